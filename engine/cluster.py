"""What a deployment's manifests are rendered for: names, images, the model, the nodes of a GPU."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from rackplan.engine.deployment import Deployment
from rackplan.engine.errors import InputError
from rackplan.engine.parser_table import EngineVersion
from rackplan.engine.placement import Placement
from rackplan.engine.specs import GpuSpec

GPU_PRODUCTS = {"h200": "NVIDIA-H200", "gb200": "NVIDIA-GB200", "gb300": "NVIDIA-GB300"}
"""The label nvidia.com/gpu.product that GPU feature discovery puts on a node."""
API_PORT = 8000
SCHEDULER_FILE = "rackplan_scheduler.py"
"""The scheduler classes as one module in a pod."""

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where and as what a deployment is applied.

    `name`: of all objects. `image`: with vLLM `engine_version`; `router_image`: with rackplan. `model`: what the pods
    load: a hub name, or a path that lies under the mount of `model_claim`, a (volume claim, mount path).
    `log_dir`: folder of the step logs in the pods; None logs nothing.
    """

    name: str
    image: str
    router_image: str
    model: str
    namespace: str = "default"
    model_claim: tuple[str, str] | None = None
    engine_version: EngineVersion = "0.33"
    log_dir: str | None = None

    def __post_init__(self) -> None:
        for option, text in (("--name", self.name), ("--namespace", self.namespace)):
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?", text):
                raise InputError(
                    f"{option} {text}: not a name that Kubernetes takes; write lower-case-words, at most 40"
                )
        under = self.model_claim is not None and (self.model + "/").startswith(self.model_claim[1].rstrip("/") + "/")
        if self.model_claim and not under:
            raise InputError(f"--model {self.model}: not under --model-claim's {self.model_claim[1]}; move one")
        if self.model.startswith(("/", "./", "../")) and not self.model_claim:
            raise InputError(f"--model {self.model}: a path in the pods; add --model-claim CLAIM:PATH")

    def placement(self, deployment: Deployment) -> Placement:
        """The placement of every pod; their revision is what they are rendered from."""
        gpu_product(deployment)
        return Placement(
            engine_version=self.engine_version,
            model=self.model,
            host="0.0.0.0",
            log_dir=self.log_dir,
            revision=self.revision(deployment),
            scheduler_module=SCHEDULER_FILE.removesuffix(".py"),
        )

    def revision(self, deployment: Deployment) -> str:
        """The same for the same deployment on the same cluster: what a running server reports is compared with it."""
        stated = json.dumps([deployment.to_dict(), asdict(self)], sort_keys=True)
        return hashlib.sha256(stated.encode()).hexdigest()[:12]


def gpu_product(deployment: Deployment) -> str:
    """The label of the nodes that the deployment is for. Raises InputError for a GPU that is in no cluster."""
    if deployment.gpu not in GPU_PRODUCTS:
        raise InputError(f"gpu={deployment.gpu}: no cluster has it; one of {', '.join(GPU_PRODUCTS)}")
    return GPU_PRODUCTS[deployment.gpu]


def refuse(target: str, what: str, mend: str) -> NoReturn:
    """Raises InputError: `target` would not run the deployment as it was simulated."""
    raise InputError(f"--target {target} does not carry {what}; set {mend}")


def refuse_many_domains(target: str, deployment: Deployment) -> None:
    """Raises InputError where the deployment needs more than one NVLink domain, which `target` cannot keep apart."""
    domain = deployment.gpu_spec.nvlink_domain_gpus
    if is_rack(deployment.gpu_spec) and deployment.gpus > domain:
        refuse(target, f"{deployment.gpus} GPUs in more than one NVLink domain of {domain}", "--target lws")


def is_rack(gpu: GpuSpec) -> bool:
    """Does NVLink reach beyond one machine?"""
    return gpu.nvlink_domain_gpus > gpu.gpus_per_tray


def selector(cluster: Cluster) -> dict[str, str]:
    """The label that all pods of the deployment have and no others: one of our own, which no operator sets."""
    return {"rackplan/deployment": cluster.name}


def labels(cluster: Cluster, component: str) -> dict[str, str]:
    """`selector`, and what the object is of the deployment."""
    return {**selector(cluster), "rackplan/component": component}


def metadata(cluster: Cluster, name: str, component: str) -> Manifest:
    """The metadata of an object of the deployment."""
    return {"name": name, "namespace": cluster.namespace, "labels": labels(cluster, component)}


def config_map(cluster: Cluster, component: str, data: dict[str, str]) -> Manifest:
    """A ConfigMap of the deployment."""
    name = f"{cluster.name}-{component}"
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(cluster, name, component), "data": data}

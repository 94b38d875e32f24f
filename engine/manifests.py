"""A deployment as files that put it on machines: `render_shell`, `render_cluster`.

Every rendering holds deployment.yaml too, so that what was applied can be compared with what comes next (changes.py).
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rackplan.engine.cluster import Cluster
from rackplan.engine.deployment import Deployment
from rackplan.engine.errors import InputError
from rackplan.engine.files import write_all
from rackplan.engine.manifest_dynamo import dynamo_manifests
from rackplan.engine.manifest_llmd import llmd_objects, llmd_values
from rackplan.engine.manifest_lws import lws_manifests
from rackplan.engine.manifest_shell import shell_files
from rackplan.engine.manifest_yaml import to_yaml
from rackplan.engine.memory import check_memory
from rackplan.engine.placement import Placement
from rackplan.engine.serving import check_renderable

ClusterTarget = Literal["lws", "dynamo", "llm-d"]
CLUSTER_TARGETS: tuple[str, ...] = get_args(ClusterTarget)
TARGETS = ("shell", *CLUSTER_TARGETS)
MANIFESTS = "manifests.yaml"
DEPLOYMENT = "deployment.yaml"
"""What a rendering is of; the next one is compared with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """`files`: text by name. `apply`: the commands that put them to use, with {out} for their folder."""

    files: Mapping[str, str]
    apply: tuple[str, ...]

    def commands(self, out: Path) -> list[str]:
        """The commands for files that lie in `out`."""
        return [c.format(out=shlex.quote(str(out))) for c in self.apply]

    def write(self, out: Path, *, force: bool = False) -> list[Path]:
        """Write all files into `out`, or none: InputError where one is there that differs, unless `force`."""
        texts = {out / name: text for name, text in self.files.items()}
        for path, text in texts.items():
            if not force and path.exists() and _read(path) != text:
                raise InputError(f"{path}: is there and differs; give another --out, or --force to replace it")
        write_all(texts)
        return list(texts)


def render_shell(deployment: Deployment, placement: Placement, port: int) -> Rendering:
    """A script for the placement's machines. `port`: the router's, where one is needed. Raises InfeasibleError where
    the deployment does not fit its GPUs, InputError on what the engine does not carry."""
    check_memory(deployment)
    files, machines = shell_files(deployment, placement, port)
    if len(placement.hosts) > machines:
        idle = ",".join(placement.hosts[machines:])
        raise InputError(f"--hosts {','.join(placement.hosts)}: the deployment takes {machines} of them; remove {idle}")
    apply = ["bash {out}/serve.sh"]
    if machines > 1:
        apply = [f"bash {{out}}/serve.sh {m}  # on {placement.hosts[m]}" for m in range(machines)]
    return Rendering(files={DEPLOYMENT: deployment.to_yaml(), **files}, apply=tuple(apply))


def render_cluster(target: ClusterTarget, deployment: Deployment, cluster: Cluster) -> Rendering:
    """Manifests or chart values. Raises InfeasibleError where the deployment does not fit its GPUs, InputError on what
    `target` or the engine does not carry."""
    check_memory(deployment)
    check_renderable(deployment, cluster.placement(deployment))
    files = {DEPLOYMENT: deployment.to_yaml()}
    kubectl = f"kubectl apply --filename {{out}}/{MANIFESTS}"
    if target != "llm-d":
        make = lws_manifests if target == "lws" else dynamo_manifests
        return Rendering(files=files | {MANIFESTS: to_yaml(make(deployment, cluster))}, apply=(kubectl,))
    objects = llmd_objects(deployment, cluster)
    if objects:
        files[MANIFESTS] = to_yaml(objects)
    files |= {name: to_yaml([values]) for name, values in llmd_values(deployment, cluster).items()}
    install = f"helm upgrade --install --namespace {cluster.namespace} {cluster.name}"
    helm = (
        f"{install} llm-d-modelservice/llm-d-modelservice --values {{out}}/modelservice.values.yaml",
        f"{install}-pool inferencepool/inferencepool --values {{out}}/inferencepool.values.yaml",
    )
    return Rendering(files=files, apply=((kubectl,) if objects else ()) + helm)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None

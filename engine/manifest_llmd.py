"""A deployment as values for llm-d: of the model service's chart (llm-d-modelservice v0.4), and of the chart of the
inference pool, whose endpoint picker chooses an instance."""

from typing import Any

from rackplan.engine.cluster import Cluster, Manifest, refuse, refuse_many_domains, selector
from rackplan.engine.deployment import Deployment
from rackplan.engine.manifest_yaml import to_yaml
from rackplan.engine.pods import (
    IMEX_CLAIM,
    PoolPods,
    claims_imex,
    environment,
    escaped,
    pool_pods,
    resources,
    scheduling,
    script,
    shared_objects,
    volume_mounts,
    volumes,
)

SIDECAR_PORT = 8200
"""vLLM's port behind the sidecar that fetches a prompt's KV, in front of decode servers."""

PICKER_IMAGE = {"hub": "ghcr.io/llm-d", "name": "llm-d-inference-scheduler", "tag": "v0.5.0"}
"""The endpoint picker whose plug-ins have the names used here."""

SCORERS = {
    "prefix_affinity": [("prefix-cache-scorer", 2.0), ("active-request-scorer", 1.0)],
    "least_requests": [("active-request-scorer", 1.0)],
}
"""Plug-ins of the endpoint picker, and their weights, by policy."""


def llmd_values(deployment: Deployment, cluster: Cluster) -> dict[str, Manifest]:
    """The model service's values and the inference pool's, by file name. Raises InputError on what llm-d lacks."""
    _check(deployment)
    pods = {p.pool.role: p for p in pool_pods(deployment, cluster, decode_port=SIDECAR_PORT)}
    last = pods.get("decode") or pods["aggregated"]
    labels = {"llm-d.ai/inferenceServing": "true", "llm-d.ai/model": cluster.name, **selector(cluster)}
    values: Manifest = {
        "fullnameOverride": cluster.name,
        # The model is an argument of each server; the chart's own download and mount are not used.
        "modelArtifacts": {"name": cluster.model, "uri": f"hf://{cluster.name}", "labels": labels},
        "multinode": True,
        "accelerator": {"type": "nvidia"},
        "routing": {
            "servicePort": 8000,
            "proxy": {"enabled": deployment.disaggregated, "targetPort": SIDECAR_PORT, "connector": "nixlv2"},
        },
        "decode": _role(deployment, last, cluster),
        "prefill": _role(deployment, pods["prefill"], cluster) if "prefill" in pods else {"create": False},
    }
    return {"modelservice.values.yaml": values, "inferencepool.values.yaml": _pool_values(deployment, labels)}


def llmd_objects(deployment: Deployment, cluster: Cluster) -> list[Manifest]:
    """What the charts do not make and the pods refer to."""
    return shared_objects(deployment, cluster)


def _check(deployment: Deployment) -> None:
    policy, entry = deployment.router.policy, deployment.pools[0]
    if policy not in SCORERS:
        refuse("llm-d", f"router.policy={policy}", f"one of {', '.join(SCORERS)}")
    if policy == "prefix_affinity" and entry.dep > 1:
        refuse("llm-d", "router.policy=prefix_affinity over ranks of one instance", "least_requests")
    if deployment.disaggregated and deployment.kv_transfer.mode == "push":
        refuse("llm-d", "kv_transfer.mode=push", "pull")
    if len({p.role for p in deployment.pools}) < len(deployment.pools):
        refuse("llm-d", "two pools of one role", "--target lws")
    refuse_many_domains("llm-d", deployment)


def _role(deployment: Deployment, pods: PoolPods, cluster: Cluster) -> Manifest:
    port = pods.leader.port
    probe = {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 10}
    image: Manifest = {
        "name": "vllm",
        "image": cluster.image,
        "modelCommand": "custom",
        "command": ["/bin/sh", "-c"],
        "args": [escaped(_script(pods))],
        "env": [_literal(e) for e in environment(pods, cluster, pods.leader.env)],
        "ports": [{"name": "metrics", "containerPort": port, "protocol": "TCP"}],
        "resources": resources(deployment, pods),
        "mountModelVolume": False,
        "volumeMounts": volume_mounts(pods, cluster),
    }
    if pods.nodes == 1:  # the chart has one template for leader and followers, which answer nothing
        image["extraConfig"] = {
            "startupProbe": {**probe, "failureThreshold": 720},
            "readinessProbe": {**probe, "failureThreshold": 3},
        }
    where = scheduling(deployment, pods, cluster)
    role: Manifest = {
        "create": True,
        "replicas": pods.pool.instances,
        "parallelism": {
            "tensor": pods.pool.tp,
            "data": pods.pool.dep,
            "dataLocal": pods.ranks,
            "workers": pods.nodes,
        },
        "extraConfig": {k: v for k, v in where.items() if k != "tolerations"},
        "tolerations": where["tolerations"],
        "containers": [image],
        "volumes": volumes(pods, cluster),
    }
    if claims_imex(deployment, pods):
        role["resourceClaims"] = [{"name": IMEX_CLAIM, "resourceClaimTemplateName": f"{cluster.name}-{IMEX_CLAIM}"}]
    return role


def _script(pods: PoolPods) -> str:
    leader = script(pods.leader, pods.ranks)
    if pods.worker is None:
        return leader
    return f'if [ "$LWS_WORKER_INDEX" = 0 ]; then\n{leader}else\n{script(pods.worker, pods.ranks)}fi\n'


def _literal(variable: Manifest) -> Manifest:
    """The chart renders variables as templates: braces of a value are kept from it."""
    if "{{" not in str(variable.get("value", "")):
        return variable
    return {**variable, "value": variable["value"].replace("{{", '{{ "{{" }}')}


def _pool_values(deployment: Deployment, labels: dict[str, str]) -> Manifest:
    return {
        "inferenceExtension": {
            "replicas": 1,
            "image": PICKER_IMAGE,
            "pluginsConfigFile": "rackplan.yaml",
            "pluginsCustomConfig": {"rackplan.yaml": to_yaml([_picker(deployment)])},
        },
        "inferencePool": {
            "targetPorts": [{"number": 8000}],
            "modelServerType": "vllm",
            # Of an instance on several machines only the first takes requests.
            "modelServers": {"matchLabels": {**labels, "leaderworkerset.sigs.k8s.io/worker-index": "0"}},
        },
    }


def _picker(deployment: Deployment) -> Manifest:
    entry = SCORERS[deployment.router.policy]
    if not deployment.disaggregated:
        profiles: list[tuple[str, list[str], list[tuple[str, float]]]] = [("default", [], entry)]
        handler: list[dict[str, Any]] = [{"type": "single-profile-handler"}]
    else:
        least = SCORERS["least_requests"]
        profiles = [("prefill", ["prefill-filter"], entry), ("decode", ["decode-filter"], least)]
        # Threshold 0: every prompt goes through a prefill instance, as it was simulated.
        parameters = {"threshold": 0, "hashBlockSize": 64}
        handler = [{"type": "prefill-header-handler"}, {"type": "pd-profile-handler", "parameters": parameters}]
    used = dict.fromkeys(p for _, filters, scorers in profiles for p in [*filters, *(s for s, _ in scorers)])
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [*handler, *({"type": p} for p in [*used, "max-score-picker"])],
        "schedulingProfiles": [
            {
                "name": name,
                "plugins": [
                    *({"pluginRef": f} for f in filters),
                    *({"pluginRef": s, "weight": w} for s, w in scorers),
                    {"pluginRef": "max-score-picker"},
                ],
            }
            for name, filters, scorers in profiles
        ],
    }

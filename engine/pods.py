"""The pods that every kind of manifest has in common: one machine's part of an instance each.

GPUs of racks (GB200, GB300) are asked for by tray: nodes of that product alone, one NVLink domain, and an IMEX channel
where memory is shared across trays.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rackplan.engine.cluster import (
    API_PORT,
    SCHEDULER_FILE,
    Cluster,
    Manifest,
    config_map,
    gpu_product,
    is_rack,
    labels,
    metadata,
    selector,
)
from rackplan.engine.deployment import Deployment, Pool
from rackplan.engine.errors import InputError
from rackplan.engine.flags import needs_scheduler_class
from rackplan.engine.placement import Placement, Slot, pool_names, ranks_per_node
from rackplan.engine.serving import ServerCommand, server_command

CLIQUE_LABEL = "nvidia.com/gpu.clique"
"""The same on all nodes of one NVLink partition."""
IMEX_CLAIM = "imex-channel"
RPC_PORT, KV_PORT = 13345, 5600
LEADER = "$LWS_LEADER_ADDRESS"
"""The address of an instance's first machine, until a shell in the pod knows it."""
SCHEDULER_FOLDER = "/opt/rackplan"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPods:
    """The pods of one pool's instances. `leader`: the server of an instance's first machine, `worker`: of the others,
    None where there are none. `nodes`: machines an instance; `gpus`: a pod's."""

    pool: Pool
    name: str
    nodes: int
    gpus: int
    leader: ServerCommand
    worker: ServerCommand | None
    ranks: int


def pool_pods(deployment: Deployment, cluster: Cluster, decode_port: int = API_PORT) -> list[PoolPods]:
    """The pods of every pool, in order. `decode_port`: the API's of decode servers, where something else stands before
    them."""
    placement = cluster.placement(deployment)
    devices = deployment.gpu_spec.gpus_per_tray
    pods = []
    for pool, name in zip(deployment.pools, pool_names(deployment), strict=True):
        nodes, ranks = ranks_per_node(pool, devices)
        port = decode_port if pool.role == "decode" else API_PORT
        commands = [
            server_command(deployment, pool, _slot(node, nodes, ranks, port), placement)
            for node in range(min(nodes, 2))
        ]
        pods.append(
            PoolPods(
                pool=pool,
                name=f"{cluster.name}-{name}",
                nodes=nodes,
                gpus=ranks * pool.tp,
                leader=commands[0],
                worker=commands[1] if nodes > 1 else None,
                ranks=ranks,
            )
        )
    return pods


def _slot(node: int, nodes: int, ranks: int, port: int) -> Slot:
    return Slot(
        instance=0,
        node=node,
        nodes=nodes,
        machine=0,
        host="0.0.0.0",
        address=LEADER,
        ranks=ranks,
        devices=(),
        api_port=port,
        rpc_port=RPC_PORT,
        kv_port=KV_PORT,
    )


# -- a pod ------------------------------------------------------------------------------------------------------------
def pod_spec(deployment: Deployment, pods: PoolPods, cluster: Cluster, command: ServerCommand) -> Manifest:
    """The pod of `command`: where it may run, its container, volumes and claims."""
    spec: Manifest = {
        **scheduling(deployment, pods, cluster),
        "containers": [container(deployment, pods, cluster, command)],
        "volumes": volumes(pods, cluster),
    }
    if claims_imex(deployment, pods):
        spec["resourceClaims"] = [{"name": IMEX_CLAIM, "resourceClaimTemplateName": f"{cluster.name}-{IMEX_CLAIM}"}]
    return spec


def scheduling(deployment: Deployment, pods: PoolPods, cluster: Cluster) -> Manifest:
    """Nodes of the deployment's GPU and no other; on a rack, pods of one NVLink domain."""
    gpu = deployment.gpu_spec
    spec: Manifest = {
        "nodeSelector": {"nvidia.com/gpu.product": gpu_product(deployment)},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    }
    if is_rack(gpu):
        spec["nodeSelector"]["kubernetes.io/arch"] = "arm64"
        spec["tolerations"].append(
            {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}
        )
        spec["affinity"] = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            one_domain(deployment, pods, cluster)
        ]}}  # fmt: skip
    return spec


def one_domain(deployment: Deployment, pods: PoolPods, cluster: Cluster) -> Manifest:
    """All pods in one NVLink domain where they fit it, else each instance's in one."""
    whole = deployment.gpus <= deployment.gpu_spec.nvlink_domain_gpus
    term: Manifest = {"topologyKey": CLIQUE_LABEL, "labelSelector": {"matchLabels": selector(cluster)}}
    if not whole:
        term["labelSelector"] = {"matchLabels": labels(cluster, pods.pool.role)}
        term["matchLabelKeys"] = ["leaderworkerset.sigs.k8s.io/group-key"]
    return term


def claims_imex(deployment: Deployment, pods: PoolPods) -> bool:
    """Does the pod take an IMEX channel? A node has one to give, so only a pod that leaves no GPU to another."""
    gpu = deployment.gpu_spec
    return is_rack(gpu) and (pods.nodes > 1 or pods.gpus == gpu.gpus_per_tray)


def container(deployment: Deployment, pods: PoolPods, cluster: Cluster, command: ServerCommand) -> Manifest:
    """The container of a server. Followers answer nothing, so only the first machine's is probed."""
    found: Manifest = {
        "name": "vllm",
        "image": cluster.image,
        "command": ["/bin/sh", "-c"],
        "args": [escaped(script(command, pods.ranks))],
        "env": environment(pods, cluster, command.env),
        "resources": resources(deployment, pods),
        "volumeMounts": volume_mounts(pods, cluster),
    }
    if command.port is not None:
        probe = {"httpGet": {"path": "/health", "port": command.port}, "periodSeconds": 10}
        found["ports"] = [{"name": "http", "containerPort": command.port}]
        found["startupProbe"] = {**probe, "failureThreshold": 720}
        found["readinessProbe"] = {**probe, "failureThreshold": 3}
        found["livenessProbe"] = {**probe, "failureThreshold": 12}
    return found


def script(command: ServerCommand, ranks: int) -> str:
    """The command for a shell in the pod, one option a line; addresses and ranks are what LeaderWorkerSet says."""
    words = [shlex.quote(a) for a in command.argv]
    of_pod = {"--data-parallel-address": LEADER, "--data-parallel-start-rank": f"$((LWS_WORKER_INDEX * {ranks}))"}
    for i, flag in enumerate(command.argv[:-1]):
        if flag in of_pod:
            words[i + 1] = f'"{of_pod[flag]}"'
    return lines_of(["exec", *words])


def lines_of(words: list[str]) -> str:
    """Shell words as one command, a line for each option."""
    text = words[0]
    for word in words[1:]:
        text += (" \\\n  " if word.startswith("--") else " ") + word
    return text + "\n"


def escaped(text: str) -> str:
    """`text` for a field in which Kubernetes puts variables' values for $(NAME) and $ for $$."""
    return re.sub(r"\$\$+|\$(?=\()", lambda run: run[0] * 2, text)


def environment(pods: PoolPods, cluster: Cluster, env: Mapping[str, str]) -> list[Manifest]:
    """The server's variables; its address and name are the pod's own."""
    of_pod = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "status.podIP", "RACKPLAN_SERVER_NAME": "metadata.name"}
    found: list[Manifest] = [
        {"name": k, "valueFrom": {"fieldRef": {"fieldPath": of_pod[k]}}}
        if k in of_pod
        else {"name": k, "value": escaped(v)}
        for k, v in env.items()
    ]
    if mounts_scheduler(pods, cluster):
        found.append({"name": "PYTHONPATH", "value": SCHEDULER_FOLDER})
    return found


def resources(deployment: Deployment, pods: PoolPods) -> Manifest:
    """The pod's GPUs, and its IMEX channel."""
    gpus = {"nvidia.com/gpu": str(pods.gpus)}
    found: Manifest = {"requests": dict(gpus), "limits": dict(gpus)}
    return found | ({"claims": [{"name": IMEX_CLAIM}]} if claims_imex(deployment, pods) else {})


def mounts_scheduler(pods: PoolPods, cluster: Cluster) -> bool:
    """Does the pod need rackplan's scheduler class?"""
    return needs_scheduler_class(pods.pool, Placement(log_dir=cluster.log_dir))


def volumes(pods: PoolPods, cluster: Cluster) -> list[Manifest]:
    """Shared memory for the ranks; the model, the scheduler class and the step logs where there are any."""
    found: list[Manifest] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    if cluster.model_claim:
        claim = {"claimName": cluster.model_claim[0], "readOnly": True}
        found.append({"name": "model", "persistentVolumeClaim": claim})
    if mounts_scheduler(pods, cluster):
        found.append({"name": "scheduler", "configMap": {"name": f"{cluster.name}-scheduler"}})
    if cluster.log_dir:
        found.append({"name": "step-logs", "emptyDir": {}})
    return found


def volume_mounts(pods: PoolPods, cluster: Cluster) -> list[Manifest]:
    """Where `volumes` are."""
    found: list[Manifest] = [{"name": "shm", "mountPath": "/dev/shm"}]
    if cluster.model_claim:
        found.append({"name": "model", "mountPath": cluster.model_claim[1], "readOnly": True})
    if mounts_scheduler(pods, cluster):
        found.append({"name": "scheduler", "mountPath": SCHEDULER_FOLDER, "readOnly": True})
    if cluster.log_dir:
        found.append({"name": "step-logs", "mountPath": cluster.log_dir})
    return found


# -- what pods refer to ------------------------------------------------------------------------------------------------
def shared_objects(deployment: Deployment, cluster: Cluster) -> list[Manifest]:
    """What pods refer to: the domain in which trays share memory, the scheduler class."""
    all_pods = pool_pods(deployment, cluster)
    found: list[Manifest] = []
    if any(claims_imex(deployment, p) for p in all_pods):
        found.append(
            {
                "apiVersion": "resource.nvidia.com/v1beta1",
                "kind": "ComputeDomain",
                "metadata": metadata(cluster, cluster.name, "domain"),
                "spec": {
                    # 0: a pod is let go as soon as its own node's daemon runs; vLLM waits for its peers itself.
                    "numNodes": 0,
                    "channel": {"resourceClaimTemplate": {"name": f"{cluster.name}-{IMEX_CLAIM}"}},
                },
            }
        )
    if any(mounts_scheduler(p, cluster) for p in all_pods):
        found.append(config_map(cluster, "scheduler", {SCHEDULER_FILE: scheduler_source()}))
    return found


def scheduler_source() -> str:
    """The text of the scheduler classes: one file that needs vLLM and nothing else. Raises InputError without it."""
    path = Path(__file__).parent / "vllm_plugin" / "scheduler.py"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise InputError(f"{path}: cannot be read ({e.strerror}); install rackplan whole") from None

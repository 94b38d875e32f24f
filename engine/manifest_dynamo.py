"""A deployment as a DynamoGraphDeployment (nvidia.com/v1alpha1): Dynamo's frontend, and a service a pool.

The operator starts an instance that is wider than a tray: it adds the addresses and ranks of the machines itself, and
gives each machine an API server of its own (hybrid load balancing), so none of that is stated here.
"""

import shlex

from rackplan.engine.cluster import Cluster, Manifest, labels, metadata, refuse, refuse_many_domains
from rackplan.engine.deployment import Deployment, RouterPolicy
from rackplan.engine.pods import (
    IMEX_CLAIM,
    SCHEDULER_FOLDER,
    PoolPods,
    claims_imex,
    environment,
    escaped,
    lines_of,
    mounts_scheduler,
    pool_pods,
    scheduling,
    shared_objects,
    volume_mounts,
    volumes,
)

ROUTER_MODES: dict[RouterPolicy, str] = {
    "prefix_affinity": "kv",
    "least_requests": "least-loaded",
    "round_robin": "round-robin",
    "random": "random",
}
"""Dynamo's name of each policy that it has."""

OPERATORS = ("--data-parallel-size-local", "--data-parallel-address", "--data-parallel-rpc-port")
"""What the operator states of an instance on several machines."""
SERVERS = ("--host", "--port")
"""What Dynamo's worker does not take: it has no API server."""


def dynamo_manifests(deployment: Deployment, cluster: Cluster) -> list[Manifest]:
    """The graph and what its pods refer to. Raises InputError on what Dynamo does not carry."""
    _check(deployment)
    pods = pool_pods(deployment, cluster)
    services = {"Frontend": _frontend(deployment, cluster)}
    services |= {p.name.removeprefix(f"{cluster.name}-"): _service(deployment, p, cluster) for p in pods}
    graph = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": metadata(cluster, cluster.name, "graph"),
        "spec": {"backendFramework": "vllm", "services": services},
    }
    return [*shared_objects(deployment, cluster), graph]


def _check(deployment: Deployment) -> None:
    policy = deployment.router.policy
    if policy not in ROUTER_MODES:
        refuse("dynamo", f"router.policy={policy}", f"one of {', '.join(ROUTER_MODES)}")
    if policy in ("round_robin", "random") and deployment.pools[0].dep > 1:
        refuse("dynamo", f"router.policy={policy} over ranks of one instance", "prefix_affinity or least_requests")
    if deployment.disaggregated and deployment.kv_transfer.mode == "push":
        refuse("dynamo", "kv_transfer.mode=push", "pull")
    refuse_many_domains("dynamo", deployment)


def _frontend(deployment: Deployment, cluster: Cluster) -> Manifest:
    return {
        "componentType": "frontend",
        "replicas": 1,
        "envs": [{"name": "DYN_ROUTER_MODE", "value": ROUTER_MODES[deployment.router.policy]}],
        "extraPodSpec": {"mainContainer": {"image": cluster.image}},
    }


def _service(deployment: Deployment, pods: PoolPods, cluster: Cluster) -> Manifest:
    gpus, imex = {"gpu": str(pods.gpus)}, claims_imex(deployment, pods)
    service: Manifest = {
        "componentType": "worker",
        **({"subComponentType": pods.pool.role} if pods.pool.role != "aggregated" else {}),
        "replicas": pods.pool.instances,
        **({"multinode": {"nodeCount": pods.nodes}} if pods.nodes > 1 else {}),
        "resources": {"requests": gpus, "limits": gpus, **({"claims": [{"name": IMEX_CLAIM}]} if imex else {})},
        "extraPodMetadata": {
            "labels": labels(cluster, pods.pool.role),
            "annotations": {"rackplan/revision": cluster.revision(deployment)},
        },
        "extraPodSpec": {**scheduling(deployment, pods, cluster), "mainContainer": _container(pods, cluster)},
    }
    # Shared memory is the operator's.
    if others := [v for v in volumes(pods, cluster) if v["name"] != "shm"]:
        service["extraPodSpec"]["volumes"] = others
    if imex:
        claim = {"name": IMEX_CLAIM, "resourceClaimTemplateName": f"{cluster.name}-{IMEX_CLAIM}"}
        service["extraPodSpec"]["resourceClaims"] = [claim]
    return service


def _container(pods: PoolPods, cluster: Cluster) -> Manifest:
    found: Manifest = {
        "image": cluster.image,
        "command": ["/bin/sh", "-c"],
        "args": [escaped(_script(pods, cluster))],
        "env": [e for e in environment(pods, cluster, pods.leader.env) if e["name"] != "PYTHONPATH"],
        "startupProbe": {"httpGet": {"path": "/health", "port": 9090}, "periodSeconds": 10, "failureThreshold": 720},
    }
    mounts = [m for m in volume_mounts(pods, cluster) if m["name"] != "shm"]
    return found | ({"volumeMounts": mounts} if mounts else {})


def _script(pods: PoolPods, cluster: Cluster) -> str:
    """Dynamo's worker with vLLM's options. Its image has a PYTHONPATH of its own, which stays."""
    argv = pods.leader.argv
    dropped = SERVERS + (OPERATORS if pods.pool.dep > 1 else ())
    kept = [a for i, a in enumerate(argv[3:], 3) if a not in dropped and argv[i - 1] not in dropped]
    role = [] if pods.pool.role == "aggregated" else ["--disaggregation-mode", pods.pool.role]
    worker = ["exec", "python3", "-m", "dynamo.vllm", "--model", shlex.quote(argv[2]), *role]
    path = f'export PYTHONPATH="{SCHEDULER_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}}"\n'
    return (path if mounts_scheduler(pods, cluster) else "") + lines_of([*worker, *map(shlex.quote, kept)])

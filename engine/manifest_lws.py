"""A deployment as LeaderWorkerSets (leaderworkerset.x-k8s.io/v1): one a pool, a group of pods an instance."""

from rackplan.engine.cluster import API_PORT, Cluster, Manifest, config_map, labels, metadata, selector
from rackplan.engine.deployment import Deployment
from rackplan.engine.pods import PoolPods, pod_spec, pool_pods, shared_objects
from rackplan.engine.router_config import Address, needs_router, router_json
from rackplan.engine.serving import ServerCommand

ROUTER_CONFIG = "/etc/rackplan/router.json"


def lws_manifests(deployment: Deployment, cluster: Cluster) -> list[Manifest]:
    """All objects, those that others refer to first. Requests come in at the Service of the deployment's name."""
    pods = pool_pods(deployment, cluster)
    objects = shared_objects(deployment, cluster) + [_worker_set(deployment, p, cluster) for p in pods]
    if needs_router(deployment):
        return objects + _router(deployment, pods, cluster)
    first = {"leaderworkerset.sigs.k8s.io/name": pods[0].name, "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    return [*objects, _service(cluster, {**selector(cluster), **first})]


def _worker_set(deployment: Deployment, pods: PoolPods, cluster: Cluster) -> Manifest:
    template: Manifest = {
        "size": pods.nodes,
        # Ranks of an instance live and die together: without one the others wait for it forever.
        "restartPolicy": "RecreateGroupOnPodRestart",
        "workerTemplate": _template(deployment, pods, cluster, pods.worker or pods.leader),
    }
    if pods.worker:
        template["leaderTemplate"] = _template(deployment, pods, cluster, pods.leader)
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": metadata(cluster, pods.name, pods.pool.role),
        "spec": {
            "replicas": pods.pool.instances,
            "startupPolicy": "LeaderCreated",
            "networkConfig": {"subdomainPolicy": "Shared"},
            "leaderWorkerTemplate": template,
        },
    }


def _template(deployment: Deployment, pods: PoolPods, cluster: Cluster, command: ServerCommand) -> Manifest:
    return {
        "metadata": {
            "labels": labels(cluster, pods.pool.role),
            "annotations": {"rackplan/revision": cluster.revision(deployment)},
        },
        "spec": pod_spec(deployment, pods, cluster, command),
    }


def _service(cluster: Cluster, selected: dict[str, str]) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(cluster, cluster.name, "api"),
        "spec": {"selector": selected, "ports": [{"name": "http", "port": API_PORT, "targetPort": API_PORT}]},
    }


def instance_urls(pods: PoolPods, cluster: Cluster) -> list[str]:
    """Where the instances of a pool answer: the first pod of each group, in the set's own headless service."""
    place = f"{pods.name}.{cluster.namespace}.svc"
    return [f"http://{pods.name}-{i}.{place}:{API_PORT}" for i in range(pods.pool.instances)]


def _router(deployment: Deployment, pods: list[PoolPods], cluster: Cluster) -> list[Manifest]:
    addresses = [
        Address(role=p.pool.role, url=url, ranks=p.pool.dep) for p in pods for url in instance_urls(p, cluster)
    ]
    config = router_json(deployment, addresses, host="0.0.0.0", port=API_PORT)
    return [
        config_map(cluster, "router", {"router.json": config}),
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(cluster, f"{cluster.name}-router", "router"),
            "spec": {
                "replicas": 1,
                # Two at once would each know half of what is in flight.
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": labels(cluster, "router")},
                "template": {
                    "metadata": {
                        "labels": labels(cluster, "router"),
                        "annotations": {"rackplan/revision": cluster.revision(deployment)},
                    },
                    "spec": _router_pod(cluster),
                },
            },
        },
        _service(cluster, labels(cluster, "router")),
    ]


def _router_pod(cluster: Cluster) -> Manifest:
    return {
        "containers": [
            {
                "name": "router",
                "image": cluster.router_image,
                "command": ["python3", "-m", "rackplan.engine.router", ROUTER_CONFIG],
                "ports": [{"name": "http", "containerPort": API_PORT}],
                "readinessProbe": {"httpGet": {"path": "/health", "port": API_PORT}, "periodSeconds": 5},
                "volumeMounts": [{"name": "config", "mountPath": "/etc/rackplan", "readOnly": True}],
            }
        ],
        "volumes": [{"name": "config", "configMap": {"name": f"{cluster.name}-router"}}],
    }

"""Where a deployment runs: the machines, their devices and the ports, laid out for every server of it.

An instance that is wider than a machine takes several, each with the same number of ranks; a narrower one never lies
across two. The layout is pure arithmetic: nothing is asked of the machines.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rackplan.engine.deployment import Deployment, Pool
from rackplan.engine.errors import InputError
from rackplan.engine.parser_table import EngineVersion
from rackplan.engine.specs import Device

SCHEDULER_MODULE = "rackplan.engine.vllm_plugin.scheduler"
"""Where vLLM finds rackplan's scheduler classes, with rackplan installed beside it."""
LAST_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What a deployment runs on.

    `model`: the folder or hub name to serve; None takes the model's own `checkpoint`.
    `host`: what API servers bind to. `hosts`: names of the machines, in order; none: everything is on this one.
    `first_port`: API ports count up from it, the ports between the servers follow them.
    `devices_per_node`: GPUs of one machine (None: of one tray of the deployment's GPU), or cores on the CPU engine.
    `cores_per_device`: cores that one rank is bound to on the CPU engine.
    `log_dir`: folder of the step logs; None logs nothing. `revision`: what the servers report as theirs.
    `scheduler_module`: where vLLM finds the scheduler classes.
    """

    device: Device = "cuda"
    engine_version: EngineVersion = "0.33"
    model: str | None = None
    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()
    first_port: int = 8100
    devices_per_node: int | None = None
    cores_per_device: int = 1
    log_dir: str | None = None
    revision: str | None = None
    scheduler_module: str = SCHEDULER_MODULE

    def served_model(self, deployment: Deployment) -> str:
        """What follows `vllm serve`. Raises InputError where none is given and where it reads as an option."""
        name = deployment.model_spec.checkpoint if self.model is None else self.model
        if not name:
            raise InputError(f"model={deployment.model}: its checkpoint is not known; give --model PATH or a hub name")
        if name.startswith("-") or "\0" in name:
            raise InputError(f"--model {name!r}: vLLM would read it as an option; write ./{name.lstrip('-')}")
        return name

    def has_weights(self, deployment: Deployment) -> bool:
        """False for a folder of a model without weights, which is served with random ones."""
        folder = Path(self.served_model(deployment))
        return not folder.is_dir() or any(
            f.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") for f in folder.iterdir()
        )

    def node_devices(self, deployment: Deployment) -> int:
        """Devices of one machine that ranks can lie on."""
        if self.devices_per_node is None:
            return deployment.gpu_spec.gpus_per_tray
        return self.devices_per_node // (self.cores_per_device if self.device == "cpu" else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One machine's part of an instance. `node`: 0 holds the API server; `machine`: index into the machines;
    `address`: of node 0; `ranks`: data-parallel ranks here; `ports`: of the API, between ranks, of the first rank's KV
    side channel."""

    instance: int
    node: int
    nodes: int
    machine: int
    host: str
    address: str
    ranks: int
    devices: tuple[int, ...]
    api_port: int
    rpc_port: int
    kv_port: int

    @property
    def first_rank(self) -> int:
        return self.node * self.ranks


def ranks_per_node(pool: Pool, devices: int) -> tuple[int, int]:
    """(machines of an instance, its data-parallel ranks on each): the fewest machines that share the ranks evenly.
    Raises InputError where one rank alone is wider than a machine of `devices`."""
    most = devices // pool.tp
    if most == 0:
        raise InputError(
            f"{pool.role}.tp={pool.tp}: a rank does not fit one machine of {devices} devices; lower tp or give "
            f"machines with more"
        )
    nodes = next(n for n in range(-(-pool.dep // most), pool.dep + 1) if pool.dep % n == 0)
    return nodes, pool.dep // nodes


def pool_names(deployment: Deployment) -> list[str]:
    """A name for every pool, in order: its role, a role's later ones with their place ("prefill", "prefill-1")."""
    roles = [p.role for p in deployment.pools]
    places = [roles[:i].count(r) for i, r in enumerate(roles)]
    return [r + (f"-{n}" if n else "") for r, n in zip(roles, places, strict=True)]


def numbered_instances(deployment: Deployment) -> list[tuple[Pool, int]]:
    """(pool, number) of every instance, pools in order; numbers run on over the pools of a role."""
    seen: Counter[str] = Counter()
    numbered = []
    for pool in deployment.pools:
        for _ in range(pool.instances):
            numbered.append((pool, seen[pool.role]))
            seen[pool.role] += 1
    return numbered


def lay_out(deployment: Deployment, placement: Placement) -> list[tuple[Pool, tuple[Slot, ...]]]:
    """Every instance's slots, pools in order. Raises InputError where machines or ports run out."""
    devices = placement.node_devices(deployment)
    instances = numbered_instances(deployment)
    _check_ports(placement, len(instances), sum(p.dep for p, _ in instances))
    free: list[int] = []  # devices left on each machine
    ranks_before = 0
    laid = []
    for k, (pool, instance) in enumerate(instances):
        nodes, ranks = ranks_per_node(pool, devices)
        taken = _take(free, nodes, ranks * pool.tp, devices)
        # Past the last name, `_check_machines` refuses all of it.
        hosts = [placement.hosts[m] if m < len(placement.hosts) else placement.host for m, _ in taken]
        slots = tuple(
            Slot(
                instance=instance,
                node=node,
                nodes=nodes,
                machine=machine,
                host=hosts[node],
                address=hosts[0],
                ranks=ranks,
                devices=tuple(range(first, first + ranks * pool.tp)),
                api_port=placement.first_port + k,
                rpc_port=placement.first_port + len(instances) + k,
                kv_port=placement.first_port + 2 * len(instances) + ranks_before,
            )
            for node, (machine, first) in enumerate(taken)
        )
        ranks_before += pool.dep
        laid.append((pool, slots))
    _check_machines(placement, len(free), deployment.gpus, devices)
    return laid


def _take(free: list[int], nodes: int, width: int, devices: int) -> Sequence[tuple[int, int]]:
    """(machine, its first device) of `nodes` machines with `width` free devices each; `free` grows as needed."""
    taken: list[tuple[int, int]] = []
    machine = 0
    while len(taken) < nodes:
        if machine == len(free):
            free.append(devices)
        if free[machine] >= width:
            taken.append((machine, devices - free[machine]))
            free[machine] -= width
        machine += 1
    return taken


def _check_machines(placement: Placement, machines: int, gpus: int, devices: int) -> None:
    if machines > max(1, len(placement.hosts)):
        raise InputError(
            f"--hosts {','.join(placement.hosts) or placement.host}: {gpus} GPUs take {machines} machines of "
            f"{devices}; name them all"
        )


def _check_ports(placement: Placement, instances: int, ranks: int) -> None:
    last = placement.first_port + 2 * instances + ranks - 1
    if placement.first_port < 1 or last > LAST_PORT:
        raise InputError(
            f"first_port={placement.first_port}: {instances} instances of {ranks} ranks take ports up to {last}; "
            f"give one from 1 to {LAST_PORT - 2 * instances - ranks + 1}"
        )

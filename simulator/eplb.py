"""Where the experts lie: contiguous blocks without EPLB, replicas packed by measured load with it.

The EPLB algorithm is the one that DeepSeek published and vLLM's default policy runs: give each spare slot to the expert
with the highest load per replica, then pack the replicas on GPUs that hold equally many, heaviest first on the least
loaded. With expert groups that divide over the nodes it first packs whole groups on nodes (hierarchical), else it
treats the instance as one node (global). Every function works on all layers at once.
"""

from dataclasses import dataclass

import numpy as np

from rackplan.engine import InputError

FloatArray = np.ndarray
IntArray = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Replicas on GPUs. `expert_of_slot`: int (layers, slots), ordered by GPU; `replica_of_slot`: int (layers, slots),
    the number of the slot's replica among its expert's, from 0; `replicas`: int (layers, experts), how many each expert
    has; `gpu_of_slot`: int (slots,).
    """

    expert_of_slot: IntArray
    replica_of_slot: IntArray
    replicas: IntArray
    gpu_of_slot: IntArray

    def gpu_loads(self, slot_loads: FloatArray) -> FloatArray:
        """Sums of (..., slots) over each GPU's slots: (..., gpus)."""
        starts = np.flatnonzero(np.diff(self.gpu_of_slot, prepend=-1))
        return np.add.reduceat(slot_loads, starts, axis=-1)


def linear_placement(layers: int, experts: int, gpus: int) -> Placement:
    """One replica each, contiguous blocks, the first GPUs one expert more where they do not divide: vLLM's `linear`."""
    _check_gpus(gpus, experts)
    slots = np.tile(np.arange(experts), (layers, 1))
    share, extra = divmod(experts, gpus)
    counts = np.full(gpus, share)
    counts[:extra] += 1
    return Placement(
        expert_of_slot=slots,
        replica_of_slot=np.zeros_like(slots),
        replicas=np.ones_like(slots),
        gpu_of_slot=np.repeat(np.arange(gpus), counts),
    )


def start_placement(layers: int, experts: int, redundant_experts: int, gpus: int) -> Placement:
    """What an engine with EPLB starts with: experts in order, then the redundant ones, from the first expert on again,
    equally many slots on each GPU. Raises InputError where they do not divide over the GPUs."""
    slots = experts + redundant_experts
    _check_slots(experts, redundant_experts, gpus)
    expert_of_slot = np.tile(np.arange(slots) % experts, (layers, 1))
    return Placement(
        expert_of_slot=expert_of_slot,
        replica_of_slot=np.tile(np.arange(slots) // experts, (layers, 1)),
        replicas=np.tile(np.bincount(expert_of_slot[0], minlength=experts), (layers, 1)),
        gpu_of_slot=np.repeat(np.arange(gpus), slots // gpus),
    )


def eplb_placement(
    loads: FloatArray, *, redundant_experts: int, gpus: int, groups: int = 1, nodes: int = 1
) -> Placement:
    """The EPLB placement for measured `loads` (layers, experts), tokens >= 0 per window.

    groups: expert groups of the router; nodes: machines of the instance. Where groups or GPUs do not divide over the
    nodes, placement is global, as in vLLM. Raises InputError where experts + redundant experts do not divide over the
    GPUs, or experts over the groups.
    """
    layers, experts = loads.shape
    slots = experts + redundant_experts
    _check_slots(experts, redundant_experts, gpus)
    if groups < 1 or experts % groups:
        raise InputError(f"groups={groups}: must divide {experts} experts")
    if gpus % nodes or groups % nodes:
        groups = nodes = 1
    by_node = _experts_by_node(loads, groups, nodes).reshape(layers * nodes, experts // nodes)
    row = np.repeat(np.arange(layers), nodes)[:, None]
    local, rank, count = replicate(loads[row, by_node], slots // nodes)
    weights = np.take_along_axis(loads[row, by_node] / count, local, axis=1)
    order = _pack(weights, gpus // nodes)
    expert_of_slot = np.take_along_axis(by_node, np.take_along_axis(local, order, axis=1), axis=1)
    replicas = np.empty((layers, experts), dtype=np.int64)
    replicas[row, by_node] = count
    return Placement(
        expert_of_slot=expert_of_slot.reshape(layers, slots),
        replica_of_slot=np.take_along_axis(rank, order, axis=1).reshape(layers, slots),
        replicas=replicas,
        gpu_of_slot=np.repeat(np.arange(gpus), slots // gpus),
    )


def _experts_by_node(loads: FloatArray, groups: int, nodes: int) -> IntArray:
    """Experts (layers, experts) ordered by node: whole groups packed on nodes by their summed load."""
    layers, experts = loads.shape
    size = experts // groups
    order = _pack(loads.reshape(layers, groups, size).sum(axis=2), nodes)
    return (order[:, :, None] * size + np.arange(size)).reshape(layers, experts)


def replicate(loads: FloatArray, slots: int) -> tuple[IntArray, IntArray, IntArray]:
    """Expert and replica number of each slot (rows, slots), and replicas of each expert (rows, experts).

    The first slots are the experts in order; each further one goes to the highest load per replica, lowest index first.
    """
    rows, experts = loads.shape
    count = np.ones((rows, experts), dtype=np.int64)
    expert_of_slot = np.empty((rows, slots), dtype=np.int64)
    rank = np.zeros((rows, slots), dtype=np.int64)
    expert_of_slot[:, :experts] = np.arange(experts)
    per_replica = loads.astype(float)
    row = np.arange(rows)
    for slot in range(experts, slots):
        hottest = per_replica.argmax(axis=1)
        expert_of_slot[:, slot] = hottest
        rank[:, slot] = count[row, hottest]
        count[row, hottest] += 1
        per_replica[row, hottest] = loads[row, hottest] / count[row, hottest]
    return expert_of_slot, rank, count


def _pack(weights: FloatArray, packs: int) -> IntArray:
    """Items (rows, items) ordered by pack, items / packs to each: heaviest first to the lightest pack with room."""
    rows, items = weights.shape
    room = items // packs
    if room == 1:
        return np.tile(np.arange(items), (rows, 1))
    heaviest = np.argsort(-weights, axis=1, kind="stable")
    sorted_weights = np.take_along_axis(weights, heaviest, axis=1)
    row = np.arange(rows)
    total = np.zeros((rows, packs))
    taken = np.zeros((rows, packs), dtype=np.int64)
    order = np.empty((rows, items), dtype=np.int64)
    for i in range(items):
        lightest = total.argmin(axis=1)
        held = taken[row, lightest]
        order[row, lightest * room + held] = heaviest[:, i]
        taken[row, lightest] = held + 1
        # A full pack weighs infinitely much, so that argmin never chooses it again.
        total[row, lightest] = np.where(held + 1 == room, np.inf, total[row, lightest] + sorted_weights[:, i])
    return order


def _check_slots(experts: int, redundant: int, gpus: int) -> None:
    _check_gpus(gpus, experts)
    if redundant < 0 or (experts + redundant) % gpus:
        raise InputError(
            f"eplb.redundant_experts={redundant}: {experts} experts + redundant must divide over {gpus} GPUs; "
            f"nearest {_nearest_redundant(experts, redundant, gpus)}"
        )


def _check_gpus(gpus: int, experts: int) -> None:
    if not 1 <= gpus <= experts:
        raise InputError(f"gpus={gpus}: {experts} experts lie on 1 to {experts} GPUs")


def _nearest_redundant(experts: int, redundant: int, gpus: int) -> str:
    lowest = -experts % gpus
    below = max(lowest, redundant - (experts + redundant) % gpus)
    return ", ".join(map(str, sorted({below, below + gpus})))

"""Waiting for experts that lie in host memory, as vLLM's prefetching offloader loads them."""

from rackplan.engine.deployment import WeightOffload

STEPS = 4
"""Steps that are played, of which the last counts: the first begins with its loads under way."""


def offloaded_layers(offload: WeightOffload, *, layers: int, dense_layers: int) -> list[int]:
    """Layers, from 0, whose routed experts lie in host memory: the last `num_in_group` of each group; the first
    `dense_layers` have none."""
    if not offload.group_size:
        return []
    kept = offload.group_size - offload.num_in_group
    return [i for i in range(dense_layers, layers) if i % offload.group_size >= kept]


def weight_wait_ms(
    offload: WeightOffload, *, layers: int, dense_layers: int, layer_ms: float, load_ms: float
) -> float:
    """What the layers of one step wait for their experts, ms, where steps follow one another.

    When an offloaded layer has ended, the load of the one `prefetch_step` offloaded layers further on is queued, over
    the step's end too; loads of `load_ms` take the host link one by one. Every layer computes for `layer_ms`.
    """
    held = offloaded_layers(offload, layers=layers, dense_layers=dense_layers)
    ahead = min(offload.prefetch_step, len(held))
    loaded = [load_ms * (i + 1) for i in range(len(held))]  # of these the first `ahead` are under way
    link_free, now, waited = load_ms * ahead, 0.0, 0.0
    for _ in range(STEPS):
        waited, done = 0.0, 0
        for i, layer in enumerate(held):
            now += (layer - done) * layer_ms
            wait = max(0.0, loaded[i] - now)
            waited += wait
            now += wait + layer_ms
            done = layer + 1
            link_free = max(link_free, now) + load_ms
            loaded[(i + ahead) % len(held)] = link_free
        now += (layers - done) * layer_ms
    return waited

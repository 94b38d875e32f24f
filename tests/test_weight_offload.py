"""Waiting for weights from host memory, by hand: c is what a layer computes, L what a load takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackplan.calibration.weight_offload import offloaded_layers, weight_wait_ms
from rackplan.engine import parse_deployment, plan_memory
from rackplan.engine.deployment import WeightOffload

GIB = 2**30


def wait_ms(load_ms: float, *, layers: int = 8, dense: int = 0, c: float = 1.0, **offload: int) -> float:
    return weight_wait_ms(
        WeightOffload(**offload), layers=layers, dense_layers=dense, layer_ms=c, load_ms=load_ms
    )


def test_the_last_layers_of_each_group_are_offloaded_and_dense_ones_never():
    two_of_four = WeightOffload(group_size=4, num_in_group=2)
    assert offloaded_layers(two_of_four, layers=9, dense_layers=0) == [2, 3, 6, 7]
    assert offloaded_layers(two_of_four, layers=9, dense_layers=3) == [3, 6, 7]
    assert offloaded_layers(WeightOffload(), layers=9, dense_layers=3) == []


@pytest.mark.parametrize(
    ("load_ms", "offload", "expected"),
    [
        # Every second of 8 layers, one ahead: a load has the one layer between. 4 x (L - c).
        (0.9, {"group_size": 2}, 0.0),
        (1.5, {"group_size": 2}, 4 * 0.5),
        (7.0, {"group_size": 2}, 4 * 6.0),
        # Two ahead: three layers between, but a load every 2 c on the link. 4 x max(0, L - 2 c).
        (1.9, {"group_size": 2, "prefetch_step": 2}, 0.0),
        (2.5, {"group_size": 2, "prefetch_step": 2}, 4 * 0.5),
        # Every fourth, one ahead: three layers between. 2 x (L - 3 c).
        (2.9, {"group_size": 4}, 0.0),
        (5.0, {"group_size": 4}, 2 * 2.0),
        # The last two of four, one ahead: nothing lies between 2 and 3, two layers between 3 and 6. 2 L + 2 (L - 2 c).
        (1.0, {"group_size": 4, "num_in_group": 2}, 2 * 1.0),
        (3.0, {"group_size": 4, "num_in_group": 2}, 2 * 3.0 + 2 * 1.0),
        # Every layer, one ahead: nothing ever lies between. 8 x L.
        (0.5, {"group_size": 1}, 8 * 0.5),
        # Every layer, two ahead: the one between.
        (0.9, {"group_size": 1, "prefetch_step": 2}, 0.0),
        (1.5, {"group_size": 1, "prefetch_step": 2}, 8 * 0.5),
    ],
)
def test_waits_are_those_computed_by_hand(load_ms, offload, expected):
    assert wait_ms(load_ms, **offload) == pytest.approx(expected)


@given(
    st.floats(0.01, 20.0),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_a_step_takes_no_less_than_its_loads_and_one_further_ahead_never_waits_longer(load, group, num, ahead, dense):
    layers = 20
    offload = {"group_size": group, "num_in_group": min(num, group), "prefetch_step": ahead}
    loads = len(offloaded_layers(WeightOffload(**offload), layers=layers, dense_layers=dense))
    wait = wait_ms(load, layers=layers, dense=dense, **offload)
    assert layers + wait >= loads * load * (1 - 1e-9)
    assert wait <= loads * load * (1 + 1e-9)
    further = wait_ms(load, layers=layers, dense=dense, **{**offload, "prefetch_step": ahead + 1})
    assert further <= wait + 1e-6


def test_the_memory_plan_counts_the_buffers_that_are_loaded_to():
    def experts_gib(**offload: int) -> float:
        pool = {"role": "aggregated", "instances": 1, "dep": 8, "offload": offload}
        deployment = parse_deployment({"model": "deepseek-v3", "gpu": "gb200", "pools": [pool]})
        return plan_memory(deployment, deployment.pools[0]).routed_experts_gib

    whole, layer = experts_gib(), 256 / 8 * 24.8e6 / GIB
    assert experts_gib(group_size=2) == pytest.approx(whole / 2 + layer)
    assert experts_gib(group_size=2, prefetch_step=3) == pytest.approx(whole / 2 + 3 * layer)

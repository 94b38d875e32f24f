"""What the plug-in puts in vLLM's place on the CPU, piece by piece; test_data_parallel.py runs it whole."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st

from rackplan.engine.vllm_plugin import cpu_hooks, cpu_platform, routing

quick = settings(max_examples=30, deadline=None, derandomize=True)


def dense_experts(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, experts, expert_map, *args):
    """Sum over the chosen experts of weight x (hidden @ w1[expert]); takes no expert map, as the CPU's kernel."""
    assert expert_map is None
    output.copy_((torch.einsum("th,tkho->tko", hidden_states, w1[topk_ids.long()]) * topk_weights.unsqueeze(-1)).sum(1))


@quick
@given(tokens=st.integers(0, 20), experts=st.integers(2, 12), ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_ranks_outputs_add_up_to_all_experts_output(tokens, experts, ranks, seed):
    make = torch.Generator().manual_seed(seed)
    hidden = torch.rand(tokens, 6, generator=make, dtype=torch.float64)
    w1 = torch.rand(experts, 6, 6, generator=make, dtype=torch.float64)
    ids = torch.rand(tokens, experts, generator=make).topk(2, -1).indices.int()
    weights = torch.rand(tokens, 2, generator=make, dtype=torch.float64)
    holder = torch.randint(ranks, (experts,), generator=make)

    def output(w1, expert_map):
        out = torch.full_like(hidden, 7.0)
        local = cpu_hooks._with_expert_map(dense_experts)
        local(None, out, hidden, w1, None, weights, ids, "silu", experts, expert_map)
        return out

    total = torch.zeros_like(hidden)
    for rank in range(ranks):
        mine = (holder == rank).nonzero().flatten()
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        total += output(w1[mine], expert_map)
    torch.testing.assert_close(total, output(w1, None))


@quick
@given(tokens=st.integers(0, 40), padding=st.integers(0, 10), record=st.booleans(), seed=st.integers(0, 99))
def test_a_choice_goes_to_a_replica_of_its_expert_and_is_counted_once(tokens, padding, record, seed):
    make = torch.Generator().manual_seed(seed)
    logical, physical = 6, 10
    replicas = torch.cat([torch.arange(logical), torch.randint(logical, (physical - logical,), generator=make)])
    count = torch.bincount(replicas, minlength=logical)
    places = torch.full((logical, physical), -1)
    for expert in range(logical):
        places[expert, : count[expert]] = (replicas == expert).nonzero().flatten()
    ids = torch.rand(tokens + padding, logical, generator=make).topk(3, -1).indices.int()
    load = torch.zeros(physical, dtype=torch.int32)
    chosen = cpu_hooks.map_to_physical_and_record(
        ids, load, places, count, torch.tensor(record), torch.tensor(tokens)
    )
    assert (chosen.shape, chosen.dtype) == (ids.shape, ids.dtype)
    assert torch.equal(replicas[chosen.long()].int(), ids)
    expected = torch.bincount(chosen[:tokens].flatten(), minlength=physical) if record else torch.zeros(physical)
    assert torch.equal(load, expected.int())


def collectives(rank, port):
    from rackplan.engine.vllm_plugin.cpu_communicator import RackplanCpuCommunicator

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    communicator = RackplanCpuCommunicator.__new__(RackplanCpuCommunicator)
    communicator.world_size, communicator.rank_in_group = 2, rank
    communicator.device_group = torch.distributed.group.WORLD
    whole = torch.arange(10.0, dtype=torch.bfloat16).reshape(5, 2)
    sizes = [2, 3]
    mine = whole[:2] if rank == 0 else whole[2:]
    assert torch.equal(communicator.all_gatherv(mine, 0, sizes), whole)
    assert all(torch.equal(x, whole) for x in communicator.all_gatherv([mine, mine], 0, sizes))
    assert torch.equal(communicator.all_gatherv(mine[:1]), torch.stack([whole[0], whole[2]]))
    kept = whole.clone()
    assert torch.equal(communicator.reduce_scatterv(whole, 0, sizes), 2 * mine)
    assert torch.equal(whole, kept), "the input is not to be changed"
    assert torch.equal(communicator.reduce_scatterv(whole.T.contiguous(), -1, sizes), 2 * mine.T)
    torch.distributed.destroy_process_group()


def test_the_collectives_gather_unequal_parts_and_scatter_their_sum():
    from servers import free_port

    torch.multiprocessing.spawn(collectives, args=(free_port(),), nprocs=2)


@pytest.mark.parametrize("value", ["-1", "x", "nan", "9"])
def test_a_zipf_exponent_out_of_range_is_refused(value, monkeypatch):
    monkeypatch.setenv("RACKPLAN_ZIPF", value)
    with pytest.raises(ValueError, match=f"RACKPLAN_ZIPF={value}"):
        routing.exponent()


def route(exponent, monkeypatch):
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import RoutingSimulator

    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "zipf")
    monkeypatch.setenv("RACKPLAN_ZIPF", str(exponent))
    routing.register()
    torch.manual_seed(0)
    tokens, experts, top_k = 4000, 16, 4
    hidden, logits = torch.zeros(tokens, 8), torch.zeros(tokens, experts)
    weights, ids = RoutingSimulator.simulate_routing(hidden, logits, "zipf", top_k)
    assert weights.sum(-1).allclose(torch.ones(tokens))
    assert all(len(set(row)) == top_k for row in ids.tolist())
    return torch.bincount(ids.flatten(), minlength=experts)


def test_zipf_routing_prefers_the_first_experts_by_its_exponent(monkeypatch):
    even, skewed = route(0, monkeypatch), route(1, monkeypatch)
    assert even.max() < 1.15 * even.min()
    assert skewed[0] == skewed.max()
    assert skewed[0] > 4 * skewed[-1]


def test_the_plug_in_takes_the_cpu_platform_and_leaves_any_other_alone(monkeypatch):
    from vllm import platforms

    from rackplan.engine import vllm_plugin

    assert vllm_plugin.cpu_platform_class() == f"{cpu_platform.__name__}.RackplanCpuPlatform"
    monkeypatch.setattr(platforms, "cpu_platform_plugin", lambda: None)
    assert vllm_plugin.cpu_platform_class() is None


def test_on_a_gpu_nothing_of_vllm_is_replaced(monkeypatch):
    """On a platform that says it is no CPU, `register` does not even import the CPU's modules."""
    code = """
import sys
import vllm.platforms
class Gpu:
    is_cpu = staticmethod(lambda: False)
vllm.platforms.current_platform = Gpu()
from rackplan.engine import vllm_plugin
vllm_plugin.register()
assert not [m for m in sys.modules if m.startswith("rackplan.engine.vllm_plugin.cpu_")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_hook_that_is_not_there_is_named_with_vllms_version():
    with pytest.raises(RuntimeError, match=r"vLLM 0\.\d+.*base_router has no absent"):
        cpu_hooks._owner(cpu_hooks.ROUTER, "absent")

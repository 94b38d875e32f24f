"""What can be deployed: parsing with every default echoed, errors that name the key and the mend, memory by hand."""

import copy

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from models import aggregated

from rackplan.engine import (
    GPUS,
    Deployment,
    InfeasibleError,
    InputError,
    check_memory,
    gpu_spec,
    load_deployment,
    model_spec,
    parse_deployment,
    plan_memory,
)

CONTRACT = """\
model: deepseek-v4.1-flash
gpu: gb300
pools:                       # one aggregated pool, or prefill and decode pools
  - role: prefill            # prefill | decode | aggregated
    instances: 8
    dep: 2
    max_num_batched_tokens: 16384
    max_num_seqs: 256        # per DP rank, as in vLLM
  - {role: decode, instances: 1, dep: 32, max_num_batched_tokens: 1024, max_num_seqs: 128, max_new_kv_loads_per_step: 4}
eplb: {enabled: true, redundant_experts: 32, window_steps: 1000, interval_steps: 3000}
speculation: {draft_tokens: 5}
kv_transfer: {mode: push}    # push | pull
dp_sync: {algorithm: recursive_doubling}   # recursive_doubling | ring | nccl
router: {policy: prefix_affinity}
"""
GIB = 2**30


def contract(**changes) -> dict:
    """The contract's deployment with dotted keys changed: `decode__dep=24`, `eplb__enabled=False`, `model=...`."""
    data = copy.deepcopy(yaml.safe_load(CONTRACT))
    for key, value in changes.items():
        *groups, field = key.split("__")
        place = data
        for group in groups:
            roles = {p["role"]: p for p in data["pools"]}
            place = roles[group] if group in roles else place.setdefault(group, {})
        place[field] = value
    return data


def test_the_contracts_yaml_parses_as_it_stands(tmp_path):
    path = tmp_path / "a deployment.yaml"
    path.write_text(CONTRACT)
    deployment = load_deployment(path)
    prefill, decode = deployment.pools
    assert (prefill.role, prefill.instances, prefill.dep, prefill.tp) == ("prefill", 8, 2, 1)
    assert (decode.max_num_seqs, decode.max_new_kv_loads_per_step) == (128, 4)
    assert deployment.redundant_experts(decode) == 32
    assert deployment.gpus == 8 * 2 + 32


def test_every_default_is_echoed_and_reads_back_equal():
    least = {"model": "deepseek-v2-lite", "gpu": "h200", "pools": [{"role": "aggregated", "instances": 1, "dep": 1}]}
    deployment = parse_deployment(least)
    echoed = deployment.to_dict()
    assert set(echoed) == set(Deployment.model_fields)
    assert set(echoed["pools"][0]) == set(type(deployment.pools[0]).model_fields)
    for group in ("eplb", "speculation", "kv_transfer", "dp_sync", "router"):
        assert set(echoed[group]) == set(type(getattr(deployment, group)).model_fields)
    assert parse_deployment(echoed) == deployment
    assert parse_deployment(yaml.safe_load(deployment.to_yaml())) == deployment


@pytest.mark.parametrize("missing", ["model", "gpu", "pools"])
def test_model_gpu_and_pools_must_be_given(missing):
    data = contract()
    del data[missing]
    with pytest.raises(InputError, match=f"{missing}: missing; add it"):
        parse_deployment(data)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"eplbs": {}}, "eplbs: unknown key"),
        ({"decode__max_seqs": 3}, "decode.max_seqs: unknown key"),
        ({"eplb__redundant": 3}, "eplb.redundant: unknown key"),
        ({"decode__offload__group": 3}, "decode.offload.group: unknown key"),
    ],
)
def test_an_unknown_key_is_named_by_its_dotted_path(changes, says):
    with pytest.raises(InputError, match=says):
        parse_deployment(contract(**changes), "d.yaml")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"decode__instances": 0}, "decode.instances='?0'?: "),
        ({"prefill__dep": "two"}, "prefill.dep='two'"),
        ({"prefill__max_num_seqs": -1}, "prefill.max_num_seqs='?-1'?: "),
        ({"decode__gpu_memory_utilization": 1.5}, "decode.gpu_memory_utilization='?1.5'?: "),
        ({"dp_sync__algorithm": "gloo"}, "dp_sync.algorithm='gloo'.*recursive_doubling.*ring.*nccl"),
        ({"router__policy": "fastest"}, "router.policy='fastest'.*round_robin"),
        ({"router__affinity_timeout_s": 60}, "router.affinity_timeout_s has no effect.*policy=session_affinity"),
        ({"model": "gpt-2"}, "model=gpt-2: unknown; one of deepseek-v4.1-flash"),
        ({"gpu": "b9"}, "gpu=b9: unknown; one of"),
        ({"speculation__draft_tokens": 6}, "speculation.draft_tokens=6.*at most 5"),
        ({"max_model_len": 2_000_000}, "max_model_len=2000000.*at most 1048576"),
        ({"decode__max_num_batched_tokens": 64}, "decode.max_num_batched_tokens=64.*max_num_seqs=128"),
    ],
)
def test_a_bad_value_is_quoted_with_its_key_and_the_mend(changes, says):
    with pytest.raises(InputError, match=says) as e:
        parse_deployment(contract(**changes), "d.yaml")
    assert str(e.value).startswith("d.yaml: ")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("roles", [["prefill"], ["decode"], ["aggregated", "decode"], ["aggregated"] * 2, []])
def test_pools_are_one_aggregated_or_prefill_and_decode(roles):
    pools = [{"role": r, "instances": 1, "dep": 8} for r in roles]
    with pytest.raises(InputError, match="one aggregated pool, or prefill and decode pools"):
        parse_deployment({"model": "deepseek-v2-lite", "gpu": "h200", "pools": pools})


def test_dep_divides_the_experts_and_the_nearest_that_do_are_named():
    with pytest.raises(InputError, match=r"decode.dep=24: .*384 routed experts \+ 32 redundant; nearest 16, 26") as e:
        parse_deployment(contract(decode__dep=24, speculation__draft_tokens=0))
    for dep in (16, 26):
        assert str(dep) in str(e.value)
        parse_deployment(contract(decode__dep=dep, speculation__draft_tokens=0))


def test_an_instance_stays_within_one_nvlink_domain():
    with pytest.raises(InputError, match="aggregated.dep=16: an instance of 16 GPUs does not fit.*at most 8"):
        aggregated(dep=16)


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])), min_size=1))
def test_gpus_are_instances_x_dep_x_tp_over_all_pools(sizes):
    decode = [{"role": "decode", "instances": i, "dep": d, "tp": t} for i, d, t in sizes]
    prefill = {"role": "prefill", "instances": 3, "dep": 2, "tp": 2}
    deployment = parse_deployment({"model": "deepseek-v2-lite", "gpu": "h200", "pools": [prefill, *decode]})
    assert deployment.gpus == 3 * 2 * 2 + sum(i * d * t for i, d, t in sizes)
    assert [plan_memory(deployment, p).gpus_per_instance for p in deployment.pools] == [
        4,
        *(d * t for _, d, t in sizes),
    ]


@pytest.mark.parametrize("text", ["[1, 2]", "", "a: [", "model: \x00"])
def test_a_file_that_is_no_deployment_is_named(tmp_path, text):
    path = tmp_path / "d.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match="d.yaml"):
        load_deployment(path)
    with pytest.raises(InputError, match="none.yaml: cannot be read"):
        load_deployment(tmp_path / "none.yaml")


def test_memory_of_one_rank_by_hand():
    """DeepSeek-V2-Lite on two H200: 26 MoE layers of 64 experts of 17,301,504 bytes, half of them on each GPU."""
    deployment = aggregated(dep=2, max_num_batched_tokens=4096, max_cudagraph_capture_size=512)
    plan = check_memory(deployment)[0]
    experts = 26 * 64 * 17_301_504
    usable = 0.92 * gpu_spec("h200").hbm_gb * 1e9 / GIB
    rest = (31_412_000_000 - experts) / GIB
    activation = 14 * 4096 * 2048 * 2 / GIB  # live hidden-width tensors of a full chunk in BF16
    kv = usable - experts / 2 / GIB - rest - activation - 1.5 - 2.5  # CUDA graphs, runtime
    assert plan.routed_experts_gib == pytest.approx(experts / 2 / GIB)
    assert plan.replicated_weights_gib == pytest.approx(rest)
    assert plan.activation_gib == pytest.approx(activation)
    assert plan.kv_pool_gib == pytest.approx(kv)
    assert plan.kv_tokens == int(kv * GIB / 31104)


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_parts_of_the_memory_plan_add_up_to_what_vllm_may_use(gpu):
    deployment = parse_deployment(contract(gpu=gpu, decode__dep=min(32, gpu_spec(gpu).nvlink_domain_gpus // 2)))
    for pool in deployment.pools:
        plan = plan_memory(deployment, pool)
        parts = [v for k, v in plan.to_dict().items() if k.endswith("_gib") and k not in
                 ("hbm_gib", "usable_gib", "host_weights_gib")]  # fmt: skip
        assert sum(parts) == pytest.approx(plan.usable_gib, abs=0.01)


def test_redundant_experts_are_charged_to_hbm():
    plain = parse_deployment(contract(eplb={"enabled": False}))
    spare = parse_deployment(contract())
    model = model_spec("deepseek-v4.1-flash")
    grown = 32 / 32 * model.moe_layers * model.bytes_per_routed_expert / GIB
    before, after = (plan_memory(d, d.pools[1]) for d in (plain, spare))
    assert before.kv_pool_gib - after.kv_pool_gib == pytest.approx(grown)


def test_weights_that_do_not_fit_are_refused_with_shortfall_and_a_width_that_fits():
    def v3(dep):
        pool = {"role": "aggregated", "instances": 1, "dep": dep}
        return parse_deployment({"model": "deepseek-v3", "gpu": "gb200", "pools": [pool]})

    with pytest.raises(
        InfeasibleError, match=r"does not fit gb200 .* GiB short before any KV.*aggregated.dep=4 fits"
    ) as e:
        check_memory(v3(1))
    short = -plan_memory(v3(1), v3(1).pools[0]).kv_pool_gib
    assert f"{short:.2f} GiB short" in str(e.value)
    assert check_memory(v3(4))[0].kv_pool_gib > 0
    with pytest.raises(InfeasibleError):
        check_memory(v3(2))

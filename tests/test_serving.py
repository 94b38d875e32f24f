"""From a `Deployment` to `vllm serve`: every field is carried, every option is one that the release knows."""

import json
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import aggregated, disaggregated
from pydantic import BaseModel

from rackplan.engine import Deployment, InputError, parse_deployment
from rackplan.engine.flags import dp_sync_algorithm
from rackplan.engine.parser_table import (
    ENGINE_VERSIONS,
    check_command,
    check_environment,
    installed_version,
    parser_table,
    record,
    recorded_file,
)
from rackplan.engine.placement import Placement
from rackplan.engine.serving import ServerCommand, server_commands

CUDA = Placement(model="some/model")
CPU = Placement(model="some/model", device="cpu", engine_version="0.32", devices_per_node=8)
ON_CPU = {"async_scheduling": False, "max_cudagraph_capture_size": 0}


def value(command: ServerCommand, flag: str) -> str:
    """What follows `flag`; fails where it is not there exactly once."""
    found = [b for a, b in pairwise(command.argv) if a == flag]
    assert len(found) == 1, f"{flag} in {shlex.join(command.argv)}"
    return found[0]


def config(command: ServerCommand, flag: str) -> dict[str, Any]:
    return json.loads(value(command, flag))


# -- every field is carried ---------------------------------------------------------------------------------------

BASE = {
    "model": "deepseek-v3",
    "gpu": "gb300",
    "pools": [
        {"role": "prefill", "instances": 1, "dep": 4},
        {"role": "decode", "instances": 1, "dep": 8, "offload": {"group_size": 4}},
    ],
    "max_model_len": 32768,
    "eplb": {"enabled": True, "redundant_experts": 32},
}
CHANGED = {
    "role": None,  # of both pools, or the deployment is none: test_prefill_and_decode_play_their_roles
    "instances": 2,
    "dep": 16,
    "tp": 2,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 128,
    "max_new_kv_loads_per_step": 3,
    "long_prefill_token_threshold": 1024,
    "prefill_schedule_interval": 4,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": False,
    "max_cudagraph_capture_size": 256,
    "async_scheduling": False,
    "redundant_experts": 0,
    "enable_dbo": True,
    "output_proc_chunk_size": 16,
    "offload.group_size": 8,
    "kv_offloading_gib": 500,
    "offload.num_in_group": 2,
    "offload.prefetch_step": 2,
    "model": "deepseek-v4.1-flash",
    "gpu": "h200",
    "max_model_len": 65536,
    "eplb.enabled": False,
    "eplb.redundant_experts": 64,
    "eplb.window_steps": 500,
    "eplb.interval_steps": 500,
    "eplb.use_async": False,
    "speculation.draft_tokens": 1,
    "speculation.enable_adaptive_verification": True,
    "kv_transfer.mode": "pull",
}
"""Another value of each field of the decode pool and of the deployment."""

NOT_VLLMS = {
    "dp_sync.algorithm": "one a release: check_renderable refuses the others",
    "router.policy": "the router's",
    "router.affinity_timeout_s": "the router's",
}
"""Fields that no flag of vLLM carries, and whose they are. docs/deploying.md has this list."""


def leaves(part: BaseModel, prefix: str = "") -> list[str]:
    """Dotted names of every field that holds a value."""
    found = []
    for name in type(part).model_fields:
        held = getattr(part, name)
        if isinstance(held, BaseModel):
            found += leaves(held, f"{prefix}{name}.")
        elif name != "pools":
            found.append(prefix + name)
    return found


def changed(field: str, to: Any, *, pool: bool) -> Deployment:
    data = json.loads(json.dumps(BASE))
    entry = field == "kv_offloading_gib"  # a prefill pool's
    holder = data["pools"][0 if entry else 1] if pool else data
    if field == "eplb.enabled":
        data["eplb"] = {}
    if field == "speculation.enable_adaptive_verification":
        data |= {"model": "deepseek-v4.1-flash", "speculation": {"draft_tokens": 3}}
    *path, last = field.split(".")
    for key in path:
        holder = holder.setdefault(key, {})
    holder[last] = to
    return parse_deployment(data)


def rendered(deployment: Deployment) -> list[tuple]:
    placement = Placement(hosts=tuple(f"host{i}" for i in range(32)), model=f"models/{deployment.model}")
    return [(c.name, c.argv, sorted(c.env.items()), c.devices) for c in server_commands(deployment, placement)]


_BASE_FIELDS = parse_deployment(BASE)
FIELDS = [(f, True) for f in leaves(_BASE_FIELDS.pools[1])] + [(f, False) for f in leaves(_BASE_FIELDS)]


@pytest.mark.parametrize(("field", "pool"), FIELDS)
def test_a_field_is_either_rendered_or_named_as_anothers(field, pool):
    if field in NOT_VLLMS or field == "role":
        return
    assert field in CHANGED, f"{field}: a new field of Deployment must be rendered, or named in NOT_VLLMS"
    assert rendered(changed(field, CHANGED[field], pool=pool)) != rendered(_BASE_FIELDS)


def test_the_list_of_what_is_not_vllms_names_fields_that_there_are():
    assert set(NOT_VLLMS) <= {f for f, _ in FIELDS}


def test_prefill_and_decode_play_their_roles():
    deployment = disaggregated(prefill={"instances": 2}, kv_transfer={"mode": "pull"})
    roles = {c.name: config(c, "--kv-transfer-config") for c in server_commands(deployment, CUDA)}
    assert {n: r["kv_role"] for n, r in roles.items()} == {
        "prefill-0": "kv_producer",
        "prefill-1": "kv_producer",
        "decode-0": "kv_consumer",
    }
    assert {r["kv_connector"] for r in roles.values()} == {"NixlConnector"}


def test_pushing_takes_the_connector_that_pushes():
    for command in server_commands(disaggregated(), CUDA):
        assert config(command, "--kv-transfer-config")["kv_connector"] == "NixlPushConnector"


def test_an_aggregated_pool_hands_nothing_over():
    (command,) = server_commands(aggregated(), CUDA)
    assert "--kv-transfer-config" not in command.argv
    assert not [e for e in command.env if "NIXL" in e]


# -- what is assumed is stated ------------------------------------------------------------------------------------


def test_defaults_are_stated_too():
    (command,) = server_commands(aggregated(), CUDA)
    stated = {
        "--max-num-batched-tokens": "8192",
        "--max-num-seqs": "256",
        "--gpu-memory-utilization": "0.92",
        "--max-cudagraph-capture-size": "512",
        "--long-prefill-token-threshold": "0",
        "--data-parallel-size": "1",
        "--tensor-parallel-size": "1",
        "--prefill-schedule-interval": "1",
        "--kv-cache-dtype": "bfloat16",
    }
    assert {f: value(command, f) for f in stated} == stated
    assert {"--enable-prefix-caching", "--async-scheduling", "--enable-chunked-prefill"} <= set(command.argv)


def test_the_longest_request_is_stated_where_the_deployment_leaves_it_to_the_model():
    (command,) = server_commands(aggregated(), CUDA)
    assert value(command, "--max-model-len") == str(aggregated().model_spec.max_model_len)


def test_offloading_moves_the_routed_experts_alone():
    (command,) = server_commands(aggregated(offload={"group_size": 4}), CUDA)
    assert value(command, "--offload-params") == "experts"


def test_drafts_are_on_prefill_too_because_a_pair_whose_drafts_differ_refuses_to_shake_hands():
    deployment = parse_deployment({**BASE, "speculation": {"draft_tokens": 1}})
    commands = server_commands(deployment, Placement(model="m", hosts=("a", "b", "c")))
    assert {config(c, "--speculative-config")["method"] for c in commands} == {"mtp"}


def test_replicas_are_each_pools_own():
    data = {**BASE, "pools": [{**BASE["pools"][0], "redundant_experts": 0}, BASE["pools"][1]]}
    commands = server_commands(parse_deployment(data), Placement(model="m", hosts=("a", "b", "c")))
    assert [config(c, "--eplb-config")["num_redundant_experts"] for c in commands] == [0, 32, 32]


def test_the_cap_comes_with_the_scheduler_that_keeps_it():
    prefill, _, decode = server_commands(disaggregated(decode={"max_new_kv_loads_per_step": 4}), CUDA)
    assert value(decode, "--scheduler-cls").endswith(".RackplanAsyncScheduler")
    assert decode.env["RACKPLAN_MAX_NEW_KV_LOADS_PER_STEP"] == "4"
    assert "--scheduler-cls" not in prefill.argv


def test_a_step_log_comes_with_the_scheduler_that_writes_it():
    placement = Placement(model="m", log_dir="/var/log/steps", revision="r1")
    (command,) = server_commands(aggregated(async_scheduling=False), placement)
    assert value(command, "--scheduler-cls").endswith(".RackplanScheduler")
    assert command.env["RACKPLAN_STEP_LOG_DIR"] == "/var/log/steps"
    assert command.env["RACKPLAN_SERVER_NAME"] == "aggregated-0"
    assert command.env["RACKPLAN_REVISION"] == "r1"


def test_without_graphs_vllm_compiles_but_captures_nothing():
    (command,) = server_commands(aggregated(max_cudagraph_capture_size=0), CUDA)
    assert config(command, "--compilation-config") == {"cudagraph_mode": "NONE"}
    assert "--max-cudagraph-capture-size" not in command.argv


# -- what cannot be run as simulated is refused -------------------------------------------------------------------


def test_a_capture_size_that_vllm_would_round_down_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="=100: .* would take 96; set 96 or 104"):
        server_commands(aggregated(max_cudagraph_capture_size=100), CUDA)


def test_no_graph_is_larger_than_a_step():
    (command,) = server_commands(aggregated(max_num_batched_tokens=300, max_num_seqs=64), CUDA)
    assert value(command, "--max-cudagraph-capture-size") == "300"


@pytest.mark.parametrize("algorithm", ["ring", "nccl"])
def test_a_sync_that_the_release_lacks_is_refused(algorithm):
    deployment = disaggregated(dp_sync={"algorithm": algorithm})
    with pytest.raises(InputError, match=f"dp_sync.algorithm={algorithm} .set recursive_doubling."):
        server_commands(deployment, CUDA)


def test_a_single_rank_syncs_with_nobody():
    deployment = parse_deployment({**aggregated().to_dict(), "dp_sync": {"algorithm": "ring"}})
    assert server_commands(deployment, CUDA)


def test_the_cpu_engine_refuses_what_it_would_ignore_and_says_all_of_it():
    with pytest.raises(InputError) as refused:
        server_commands(disaggregated(), CPU)
    for mend in ("prefill.async_scheduling=true", "decode.max_cudagraph_capture_size=512", "(set ring)", "(set pull)"):
        assert mend in str(refused.value)


def test_eplb_on_single_gpus_is_refused():
    deployment = parse_deployment({**aggregated().to_dict(), "eplb": {"enabled": True}})
    with pytest.raises(InputError, match="eplb.enabled=true"):
        server_commands(deployment, CUDA)


# -- the CPU engine -----------------------------------------------------------------------------------------------


def test_the_cpu_engine_gets_cores_and_memory_by_its_environment():
    deployment = disaggregated(
        prefill=ON_CPU, decode=ON_CPU, kv_transfer={"mode": "pull"}, dp_sync={"algorithm": "ring"}
    )
    *_, decode = server_commands(deployment, CPU)
    assert decode.env["VLLM_CPU_OMP_THREADS_BIND"] == "2|3"
    assert int(decode.env["VLLM_CPU_KVCACHE_SPACE"]) >= 1
    assert "--gpu-memory-utilization" not in decode.argv
    assert "--enforce-eager" in decode.argv
    transfer = config(decode, "--kv-transfer-config")
    assert transfer["kv_buffer_device"] == "cpu"
    assert transfer["kv_connector_extra_config"] == {"backends": ["UCX"]}
    ports = [int(c.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for c in server_commands(deployment, CPU)]
    assert len(set(ports)) == len(ports)


def test_a_rank_may_have_several_cores():
    placement = Placement(model="m", device="cpu", engine_version="0.32", devices_per_node=4, cores_per_device=2)
    deployment = parse_deployment({**aggregated(dep=2, **ON_CPU).to_dict(), "dp_sync": {"algorithm": "ring"}})
    (command,) = server_commands(deployment, placement)
    assert command.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"


def test_a_folder_without_weights_is_served_with_random_ones(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (command,) = server_commands(aggregated(), Placement(model=str(tmp_path)))
    assert value(command, "--load-format") == "dummy"
    (tmp_path / "model.safetensors").write_text("")
    (command,) = server_commands(aggregated(), Placement(model=str(tmp_path)))
    assert "--load-format" not in command.argv


# -- machines -----------------------------------------------------------------------------------------------------


def test_an_instance_wider_than_a_machine_has_one_api_server_and_headless_nodes():
    placement = Placement(model="m", hosts=("a", "b", "c", "d"))
    first, *others = server_commands(aggregated(model="deepseek-v3", gpu="gb300", dep=16), placement)
    assert (first.node, first.port, value(first, "--host")) == (0, 8100, "a")
    assert "--headless" not in first.argv
    assert "--data-parallel-start-rank" not in first.argv
    for k, command in enumerate(others, start=1):
        assert command.port is None
        assert "--headless" in command.argv
        assert "--port" not in command.argv
        assert value(command, "--data-parallel-start-rank") == str(4 * k)
        assert command.name == f"aggregated-0-node-{k}"
    for flag, wanted in (("address", "a"), ("size", "16"), ("size-local", "4")):
        assert {value(c, f"--data-parallel-{flag}") for c in (first, *others)} == {wanted}


def test_too_few_machines_are_an_error_that_says_how_many():
    with pytest.raises(InputError, match="16 GPUs take 4 machines of 4; name them all"):
        server_commands(aggregated(model="deepseek-v3", gpu="gb300", dep=16), CUDA)


layouts = st.tuples(
    st.integers(1, 5), st.sampled_from([1, 2, 4, 8]), st.integers(1, 3), st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from([4, 8]),
)  # fmt: skip


@given(layouts)
def test_no_two_servers_share_a_device_or_a_port_and_every_gpu_is_used_once(layout):
    prefills, prefill_dep, decodes, decode_dep, devices = layout
    deployment = parse_deployment(
        {
            "model": "deepseek-v3",
            "gpu": "gb300",
            "pools": [
                {"role": "prefill", "instances": prefills, "dep": prefill_dep},
                {"role": "decode", "instances": decodes, "dep": decode_dep},
            ],
        }
    )
    placement = Placement(model="m", hosts=tuple(f"h{i}" for i in range(64)), devices_per_node=devices)
    commands = server_commands(deployment, placement)
    places = [(c.machine, d) for c in commands for d in c.devices]
    assert len(set(places)) == len(places) == deployment.gpus
    assert all(0 <= d < devices for _, d in places)
    api = [c.port for c in commands if c.port is not None]
    rpc = {value(c, "--data-parallel-rpc-port") for c in commands if "--data-parallel-rpc-port" in c.argv}
    sides = []
    for command in commands:
        if command.node == 0:
            first = int(command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
            sides += range(first, first + int(value(command, "--data-parallel-size")))
    taken = [*api, *map(int, rpc), *sides]
    assert len(set(taken)) == len(taken)
    assert len(api) == prefills + decodes


# -- the release's own parser -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ENGINE_VERSIONS)
def test_an_option_is_spelt_as_the_release_spells_it(version):
    (command,) = server_commands(aggregated(enable_prefix_caching=False), Placement(model="m", engine_version=version))
    wanted = {"0.33": "--disable-prefix-caching", "0.32": "--no-enable-prefix-caching"}[version]
    assert wanted in command.argv


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        (["--max-num-sequences", "4"], "no such option"),
        (["--max-num-seqs", "many"], "wants int"),
        (["--max-num-seqs"], "wants a value"),
        (["--max-num-seqs", "4", "--max-num-seqs", "8"], "given twice"),
        (["--enable-eplb", "--disable-eplb"], "given twice"),
        (["--all2all-backend", "carrier_pigeon"], "one of"),
        (["--eplb-config", '{"window": 5}'], "no such key"),
        (["--eplb-config", "window=5"], "wants json"),
        (["--headless", "yes"], "no such option"),
    ],
)
def test_what_the_parser_would_not_take_is_an_error(tail, problem):
    with pytest.raises(InputError, match=problem):
        check_command(("vllm", "serve", "m", *tail), parser_table("0.33"))


@pytest.mark.parametrize("name", ["-x", "--model", "a\0b", ""])
def test_a_model_that_would_be_read_as_an_option_is_refused(name):
    with pytest.raises(InputError, match="model"):
        server_commands(aggregated(), Placement(model=name))


@pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed here")
def test_the_recorded_table_is_the_installed_parsers():
    found = record()
    assert found == json.loads(recorded_file(found["engine"].rpartition(".")[0]).read_text())


@pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed here")
def test_the_installed_parser_takes_every_command():
    from rackplan.engine.parser_table import _vllm_parser

    version = installed_version().rpartition(".")[0]
    parser = _vllm_parser()
    for device in ("cuda", "cpu"):
        placement = Placement(model="m", device=device, engine_version=version, devices_per_node=8, log_dir="/l")
        synced = dp_sync_algorithm(placement.device, placement.engine_version)
        top = {"dp_sync": {"algorithm": synced}, "kv_transfer": {"mode": "pull"}}
        for command in server_commands(disaggregated(prefill=ON_CPU, decode=ON_CPU, **top), placement):
            args = parser.parse_args(list(command.argv[2:]))
            assert args.data_parallel_size == (2 if command.role == "decode" else 1)
            assert args.async_scheduling is False
            assert args.max_num_seqs == 256


@pytest.mark.parametrize("version", ENGINE_VERSIONS)
def test_a_variable_that_the_release_does_not_read_is_an_error(version):
    with pytest.raises(InputError, match="VLLM_FUSED_MOE_CHUNK_SIZE: vLLM .* does not read it"):
        check_environment({"VLLM_FUSED_MOE_CHUNK_SIZE": "1", "OTHER": "1"}, parser_table(version))


@pytest.mark.parametrize(("model", "kernel"), [("deepseek-v4.1-flash", "deep_gemm_mega_moe"), ("deepseek-v3", "auto")])
def test_experts_run_on_the_kernel_that_the_calibration_is_of(model, kernel):
    (command,) = server_commands(aggregated(model=model, gpu="gb300", dep=4), CUDA)
    assert value(command, "--moe-backend") == kernel
    assert value(command, "--all2all-backend") == "allgather_reducescatter"


def test_the_documentation_lists_what_vllm_is_not_told():
    text = (Path(__file__).parent.parent / "docs" / "deploying.md").read_text()
    for field in NOT_VLLMS:
        assert f"- `{field}`:" in text


def test_the_drafts_experts_must_lie_evenly_on_prefill_servers_too():
    pools = [{"role": "prefill", "instances": 1, "dep": 12}, {"role": "decode", "instances": 1, "dep": 8}]
    data = {"model": "deepseek-v4.1-flash", "gpu": "gb300", "pools": pools, "speculation": {"draft_tokens": 2}}
    with pytest.raises(InputError, match="prefill.dep=12 with 128 experts of the draft"):
        server_commands(parse_deployment(data), Placement(model="m", hosts=tuple("abcdef")))
    assert server_commands(
        parse_deployment({**data, "speculation": {"draft_tokens": 0}}), Placement(model="m", hosts=tuple("abcdef"))
    )


def test_servers_of_two_pools_of_one_role_have_names_of_their_own():
    pools = [{"role": "prefill", "instances": 2, "dep": d} for d in (1, 2)]
    pools += [{"role": "decode", "instances": 1, "dep": 2}]
    deployment = parse_deployment({"model": "deepseek-v2-lite", "gpu": "h200", "pools": pools})
    assert [c.name for c in server_commands(deployment, CUDA)] == [*(f"prefill-{i}" for i in range(4)), "decode-0"]


def test_another_patch_of_a_release_is_asked_itself(monkeypatch):
    asked = {"engine": "0.33.7", "environment": [], "flags": [{"names": ["--new"]}]}
    monkeypatch.setattr("rackplan.engine.parser_table.installed_version", lambda: "0.33.7")
    monkeypatch.setattr("rackplan.engine.parser_table.record", lambda: asked)
    parser_table.cache_clear()
    try:
        assert set(parser_table("0.33").flags) == {"--new"}
        assert "--max-num-seqs" in parser_table("0.32").flags
    finally:
        parser_table.cache_clear()


def test_what_a_models_spec_takes_for_granted_is_stated():
    (flash,) = server_commands(aggregated(model="deepseek-v4.1-flash", gpu="gb300", dep=4), CUDA)
    assert "--swa-bounded-replay" in flash.argv
    assert config(flash, "--engram-config") == {"cpu_offload": True}
    (other,) = server_commands(aggregated(), CUDA)
    assert not {"--swa-bounded-replay", "--engram-config"} & set(other.argv)

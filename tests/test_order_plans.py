"""bench/h200/order.py: what is served is what is simulated, on any number of GPUs."""

import gzip
import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from rackplan.calibration.h200_served import ORDER
from rackplan.calibration.readers.profile_folder import read_profile

BENCH = Path(__file__).parents[1] / "bench" / "h200"
PLANS = ["order8192", "order2048"]
GPUS = [2, 4, 8]


@pytest.fixture(scope="module")
def order():
    sys.path.append(str(BENCH))
    yield importlib.import_module("order")
    sys.path.remove(str(BENCH))


def option(server, name):
    return server.args[server.args.index(name) + 1]


@pytest.mark.parametrize("gpus", GPUS)
@pytest.mark.parametrize("plan", PLANS)
def test_servers_are_those_of_the_deployment_on_gpus_of_their_own(order, plan, gpus):
    servers = order.order_servers(gpus)
    for of in order.ordered(plan, gpus):
        mine = {role: servers[name] for role, name in of.servers.items()}
        assert sorted(g for s in mine.values() for g in s.gpus) == list(range(gpus))
        assert of.deployment.gpus == gpus
        for pool in of.deployment.pools:
            named = [s for role, s in mine.items() if role.startswith(pool.role)]
            assert len(named) == pool.instances
            for server in named:
                assert len(server.gpus) == pool.dep
                assert int(option(server, "--max-num-batched-tokens")) == pool.max_num_batched_tokens
                assert ("--kv-transfer-config" in server.args) == of.deployment.disaggregated
                assert ("--data-parallel-size" in server.args) == (pool.dep > 1)


@pytest.mark.parametrize("gpus", GPUS)
def test_all_splits_and_widths_are_compared(order, gpus):
    names = [o.name.partition("_")[0] for o in order.ordered("order8192", gpus)]
    splits = {2: ["1p1d"], 4: ["1p3d", "2p2d", "3p1d"], 8: ["2p6d", "4p4d", "6p2d"]}[gpus]
    assert names == [*splits, f"{gpus}xdep1", f"dep{gpus}"]


@pytest.mark.parametrize("gpus", GPUS)
def test_no_two_servers_share_a_port(order, gpus):
    servers = order.order_servers(gpus).values()
    ports = [s.port for s in servers] + [o.port for o in order.routers(gpus).values()]
    ports += [int(s.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) for s in servers if s.env]
    ports += [int(option(s, "--data-parallel-rpc-port")) for s in servers if "--data-parallel-rpc-port" in s.args]
    assert len(ports) == len(set(ports))


@pytest.mark.parametrize("plan", PLANS)
def test_the_memory_plan_leaves_the_kv_that_the_servers_are_given(order, plan):
    from rackplan.engine.memory import GIB, plan_memory

    servers = order.order_servers(2)
    for of in order.ordered(plan, 2):
        given = {int(option(servers[name], "--kv-cache-memory-bytes")) / GIB for name in of.servers.values()}
        planned = [plan_memory(of.deployment, pool).kv_pool_gib for pool in of.deployment.pools]
        assert planned == pytest.approx(list(given) * len(planned), rel=1e-3)


def test_a_router_sends_to_the_instances_of_its_deployment(order):
    (router,) = [o for o in order.ordered("order2048", 4) if o.name == "1p3d_b2048"]
    config = json.loads(order.router_config(router, 4))
    port = {name: s.port for name, s in order.order_servers(4).items()}
    assert [i["url"] for i in config["entry"]] == [f"http://127.0.0.1:{port['prefill0_b2048']}"]
    assert [i["url"] for i in config["decode"]] == [f"http://127.0.0.1:{port[f'decode{i}_b2048']}" for i in (1, 2, 3)]
    assert (config["port"], config["policy"]) == (router.port, "least_requests")


@pytest.mark.parametrize("gpus", GPUS)
def test_every_deployment_gets_the_same_loads_before_any_is_repeated(order, gpus):
    for plan, loads in order.order_loads(gpus).items():
        ports = [o.port for o in order.ordered(plan, gpus)]
        kept = [x for x in loads if x.kept]
        assert [x.port for x in kept] == ports * (len(order.RATES_PER_GPU) * order.TURNS)
        for port in ports:
            turns = [(x.rate, x.prompts, x.seed) for x in kept if x.port == port]
            assert turns == [(6 * gpus, 150 * gpus, 5001), (3 * gpus, 90 * gpus, 5002)] * order.TURNS


def test_a_step_log_is_cut_to_its_load_and_names_its_model(order, tmp_path):
    log = tmp_path / "steps_x.dp0.jsonl"
    first = {"config": {"model": "/somewhere/models/it", "max_num_seqs": 4}}
    cut_short = '{"step": 9, "t_'
    steps = [{"step": i, "t_s": i / 2} for i in range(8)]
    log.write_text("\n".join([*map(json.dumps, [first, *steps]), cut_short]))
    cut = importlib.import_module("order_profile").cut_steps(log, 1.0, 2.5)
    config, *kept = map(json.loads, cut.splitlines())
    assert config == {"config": {"model": "deepseek-v2-lite", "max_num_seqs": 4}}
    assert kept == steps[2:6]


def test_the_runs_that_ship_are_of_the_plans(order):
    planned = {x.name: x for loads in order.order_loads(2).values() for x in loads}
    at = {o.port: o.deployment for plan in PLANS for o in order.ordered(plan, 2)}
    runs = read_profile(ORDER).runs
    assert len(runs) == 18
    for run in runs:
        load = planned[run.name]
        assert run.deployment == at[load.port]
        assert (run.rate_req_s, len(run.served.start_s)) == (load.rate, load.prompts)


def test_the_runs_that_ship_name_no_machine():
    path = re.compile(r"(?<![\w.])/(?:tmp|root|home|work|opt|usr|mnt|data)\b")
    for file in ORDER.iterdir():
        text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
        assert not path.search(text), file.name

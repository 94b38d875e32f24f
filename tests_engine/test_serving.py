"""One server: `vllm bench serve` runs on it, its step log is complete, and it runs as it was told."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import CORES, FLAGS, SCHEDULER, VLLM, serving

PROMPTS, INPUT, OUTPUT = 16, 700, 12


@pytest.fixture(scope="module")
def server(tiny_moe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("aggregated")
    with serving("aggregated", tiny_moe, folder, cores=str(CORES[0]), RACKPLAN_REVISION="r1") as server:
        yield server


@pytest.fixture(scope="module")
def bench(server):
    """(result of the bench, the steps that it caused)."""
    before = len(server.steps())
    options = {"num_prompts": PROMPTS, "random_input_len": INPUT, "random_output_len": OUTPUT, "request_rate": 8}
    return server.bench(**options), server.steps()[before:]


def test_bench_serve_completes_every_request(bench):
    result, _ = bench
    assert result["completed"] == PROMPTS
    assert result["input_lens"] == [INPUT] * PROMPTS
    assert result["output_lens"] == [OUTPUT] * PROMPTS


def test_the_step_log_holds_every_token_of_the_run_once(bench):
    _, steps = bench
    assert sum(tokens for step in steps for tokens, _ in step["prefill"]) == PROMPTS * INPUT
    # The first output token is the prefill's.
    assert sum(step["decode_tokens"] for step in steps) == PROMPTS * (OUTPUT - 1)
    assert sum(step["decode_requests"] for step in steps) == PROMPTS * (OUTPUT - 1)
    context = sum(INPUT + i for i in range(OUTPUT - 1))
    assert sum(step["decode_context_tokens"] for step in steps) == PROMPTS * context


def test_each_prompt_is_computed_in_chunks_from_its_first_token_to_its_last(bench):
    _, steps = bench
    chunks = [tuple(chunk) for step in steps for chunk in step["prefill"]]
    starts = sorted(context for _, context in chunks)
    ends = sorted(tokens + context for tokens, context in chunks)
    assert starts.count(0) == ends.count(INPUT) == PROMPTS
    assert [c for c in starts if c] == [e for e in ends if e != INPUT]


def test_steps_keep_the_schedulers_limits_and_their_times_add_up(bench):
    _, steps = bench
    budget, seqs = int(FLAGS["--max-num-batched-tokens"]), int(FLAGS["--max-num-seqs"])
    for last, step in zip(steps, steps[1:], strict=False):
        assert step["step"] == last["step"] + 1
        assert sum(tokens for tokens, _ in step["prefill"]) + step["decode_tokens"] <= budget
        assert len(step["prefill"]) + step["decode_requests"] <= step["running"] <= seqs
        assert 0 < step["kv_usage"] <= 1
        assert step["kv_loads"] == step["preempted"] == 0
        took_ms = step["schedule_ms"] + step["execute_ms"]
        assert step["gap_ms"] is None or step["gap_ms"] >= 0.99 * took_ms
        assert (step["t_s"] - last["t_s"]) * 1e3 >= 0.99 * (last["schedule_ms"] + last["execute_ms"])


def test_the_configuration_read_back_is_the_flags(server):
    config = server.config()
    assert config == server.step_log()[0]["config"]
    for flag in ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"):
        assert config[flag[2:].replace("-", "_")] == int(FLAGS[flag])
    told = {"model": str(server.model), "scheduler_cls": SCHEDULER, "revision": "r1", "async_scheduling": False,
            "enable_prefix_caching": False, "enable_expert_parallel": False, "data_parallel_size": 1,
            "data_parallel_rank": 0, "kv_role": None, "speculative": None,
            "max_new_kv_loads_per_step": None}  # fmt: skip
    assert told.items() <= config.items()
    assert config["num_gpu_blocks"] * config["block_size"] > int(FLAGS["--max-model-len"])


def test_requests_side_by_side_share_steps(server):
    before = len(server.steps())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: server.post({"prompt": [10 + i] * 20, "max_tokens": 40}), range(8)))
    assert max(step["decode_requests"] for step in server.steps()[before:]) > 1


def test_a_step_log_that_cannot_be_written_stops_the_start_with_one_line(tiny_moe, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RACKPLAN_STEP_LOG_DIR", str(tmp_path / "file" / "logs"))
    code = f"""
from remote_kv import make_scheduler
from pathlib import Path
from rackplan.engine.vllm_plugin.scheduler import RackplanScheduler
make_scheduler(RackplanScheduler, Path({str(tiny_moe)!r}))
"""
    done = subprocess.run([VLLM[0], "-c", code], capture_output=True, text=True, cwd=__file__.rpartition("/")[0])
    assert done.returncode
    assert done.stderr.splitlines()[-1].startswith("ValueError: RACKPLAN_STEP_LOG_DIR=")

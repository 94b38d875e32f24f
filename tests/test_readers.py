"""Readers of measurements: what they make of good files, and that a bad one is one line with file and row."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackplan.calibration import h200
from rackplan.calibration.batch import Batch
from rackplan.calibration.readers.aiconfigurator import Gemm, efficiencies, gemms_of, plausible
from rackplan.calibration.readers.bench_forward import parse_case, read_bench_forward, read_forward_log
from rackplan.calibration.readers.iteration_log import as_step_log, read_iteration_log
from rackplan.calibration.readers.prometheus import parse_metrics, read_metrics
from rackplan.calibration.readers.served import read_served_runs
from rackplan.cli.main import app, execute
from rackplan.engine import GPUS, InputError


def forward_json(ranks: int = 2) -> list[dict[str, Any]]:
    def case(name: str, us: float, *requests: tuple[int, int, int]) -> dict[str, Any]:
        asked = [{"query_len": q, "kv_len": k, "num_draft_tokens": d, "chunked": False} for q, k, d in requests]
        latency = {"median": us, "mean": us, "std": 1.0, "p90": us, "sample_spread_pct": 0.4}
        rank = {"num_tokens": sum(r[0] for r in requests), "routing": "balanced", "latency_us": latency}
        return {"case": name, "requests": asked, "median_us": us, "ranks": [rank] * ranks}

    return [
        case("decode", 5200.0, *[(1, 8192, 0)] * 32),
        case("verify", 7100.0, *[(4, 4096, 3)] * 16),
        case("prefill", 28_000.0, (8192, 8192, 0)),
        case("hit", 31_000.0, (2048, 10_240, 0)),
        case("mix", 33_000.0, (2048, 2048, 0), *[(1, 1024, 0)] * 8),
    ]


LOG = """INFO loading
[forward] decode: 32 reqs, 32 tokens, median 5200.0 us, sample spread 0.40%, graph vs eager rel rms 1.0e-03
[forward] decode rank 0 kernels (x.json):
[forward] prefill: 1 reqs, 8192 tokens, median 28000.0 us, sample spread 0.10%, graph vs eager rel rms 1.0e-03
[forward] hit: 1 reqs, 20"""
CASES = ("decode=32*1@8192", "prefill=8192", "hit=2048@10240")
ITERATION = (
    "INFO 11-29 23:12:08 [loggers.py:200] Engine 000: Iteration({n}): {c} context requests, {t} context tokens, "
    "{g} generation requests, {g} generation tokens, iteration elapsed time: {ms} ms{dummy}, "
    "GPU KV cache usage: 2.0%\n"
)


def iterations(count: int = 5) -> str:
    lines = [ITERATION.format(n=i, c=int(i == 0), t=64 * int(i == 0), g=i, ms="7.25", dummy="") for i in range(count)]
    return "INFO started\n" + "".join(lines) + ITERATION.format(n=99, c=0, t=0, g=0, ms="1.0", dummy=" (dummy)")


def guidellm() -> dict[str, Any]:
    requests = [
        {
            "request_start_time": 1000.0 + i,
            "request_latency": 2.0,
            "time_to_first_token_ms": 100.0 + i,
            "inter_token_latency_ms": 10.0,
            "prompt_tokens": 512,
            "output_tokens": 190,
            "cached_tokens": 0,
        }
        for i in (1, 0, 2)
    ]
    summary = {"mean": 101.0, "median": 101.0, "percentiles": {"p90": 102.0, "p99": 102.0}}
    metrics = {k: {"successful": summary} for k in ("time_to_first_token_ms", "inter_token_latency_ms")}
    benchmark = {"metrics": metrics, "requests": {"successful": requests, "errored": [], "incomplete": []}}
    return {"metadata": {"version": 2, "guidellm_version": "0.8.1"}, "benchmarks": [benchmark]}


def aiperf(ttft_unit: str = "ms") -> dict[str, Any]:
    scale = {"ms": 1.0, "us": 1e3, "sec": 1e-3}[ttft_unit]
    times = {"avg": 100.0 * scale, "p50": 99.0 * scale, "p90": 120.0 * scale, "p99": 140.0 * scale}
    return {
        "schema_version": "1.4",
        "aiperf_version": "0.13.0",
        "time_to_first_token": {"unit": ttft_unit, **times},
        "inter_token_latency": {"unit": "ms", "avg": 10.0, "p50": 10.0, "p90": 11.0, "p99": 12.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 321.0},
    }


def aiperf_requests() -> str:
    def value(v: float, unit: str) -> dict[str, Any]:
        return {"value": v, "unit": unit}

    def line(i: int, phase: str, error: dict | None) -> str:
        metrics = {
            "time_to_first_token": value(100.0, "ms"),
            "request_latency": value(2.0, "sec"),
            "input_sequence_length": value(512, "tokens"),
            "output_sequence_length": value(190, "tokens"),
        }
        meta = {"request_start_ns": 10**18 + i * 10**9, "benchmark_phase": phase, "was_cancelled": False}
        return json.dumps({"metadata": meta, "metrics": {} if error else metrics, "error": error})

    rows = [line(0, "warmup", None), line(2, "profiling", None), line(1, "profiling", None)]
    return "\n".join([*rows, line(3, "profiling", {"code": 500})]) + "\n"


def prometheus(ttft: tuple[int, ...] = (1, 5, 8, 8), engines: tuple[str, ...] = ("0", "1"), scale: float = 1) -> str:
    """A scrape; `ttft`: cumulative counts up to 0.1, 0.2, 0.4 s and all."""
    lines = []
    for e in engines:
        labels = f'engine="{e}",model_name="m"'
        for name, value in (("num_requests_running", 3), ("num_requests_waiting", 1), ("kv_cache_usage_perc", 0.25)):
            lines.append(f"vllm:{name}{{{labels}}} {value}")
        for name, value in (("prompt_tokens", 4096), ("generation_tokens", 2048)):
            lines.append(f"vllm:{name}_total{{{labels}}} {value * scale}")
        for name, unit in (
            ("time_to_first_token_seconds", 1.0),
            ("request_time_per_output_token_seconds", 0.1),
            ("e2e_request_latency_seconds", 10.0),
            ("request_queue_time_seconds", 0.1),
            ("request_prefill_time_seconds", 0.5),
            ("request_prompt_tokens", 5000.0),
            ("request_generation_tokens", 2500.0),
        ):
            for bound, count in zip((0.1, 0.2, 0.4, math.inf), ttft, strict=True):
                le = "+Inf" if math.isinf(bound) else str(bound * unit)
                lines.append(f'vllm:{name}_bucket{{{labels},le="{le}"}} {count * scale}')
            lines += [f"vllm:{name}_sum{{{labels}}} {1.6 * unit * scale}"]
            lines += [f"vllm:{name}_count{{{labels}}} {ttft[-1] * scale}"]
    return "\n".join(lines) + "\n"


def saved(path: Path, content: Any) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# -- what good files say -----------------------------------------------------------------------------------------------
def test_bench_forward_rows_are_batches(tmp_path):
    rows = {r.id: r for r in read_bench_forward(saved(tmp_path / "f.json", forward_json()))}
    assert rows["decode_dep2"].batch == Batch(decodes=32, context_tokens=8192)
    assert (rows["verify_dep2"].batch.decodes, rows["verify_dep2"].drafts) == (16, 3)
    assert rows["hit_dep2"].batch == Batch(chunks=1, new_tokens=2048, cached_tokens=8192)
    assert rows["mix_dep2"].metric == "mixed_gpu_dep2"
    assert (rows["prefill_dep2"].measured_ms, rows["prefill_dep2"].spread_pct) == (28.0, 0.4)


def test_a_cut_log_gives_the_cases_that_were_done(tmp_path):
    whole = {r.id: r for r in read_bench_forward(saved(tmp_path / "f.json", forward_json(1)))}
    rows = read_forward_log(saved(tmp_path / "f.log", LOG), CASES, 1)
    assert [r.id for r in rows] == ["decode_dep1", "prefill_dep1"]
    assert all((r.batch, r.measured_ms) == (whole[r.id].batch, whole[r.id].measured_ms) for r in rows)


def test_a_case_is_read_as_the_engine_reads_it():
    name, requests = parse_case("mix=8192,2*2048@10240c,32*1@8192,16*4@4096:3")
    assert name == "mix"
    assert [r.decodes for r in requests] == [False] * 3 + [True] * 48
    assert requests[1][:2] == (2048, 10240)
    with pytest.raises(InputError, match=r"case 'x=1@': '1@' is not"):
        parse_case("x=1@")


def test_iterations_become_steps_without_the_dummies(tmp_path):
    found = read_iteration_log(saved(tmp_path / "server.log", iterations() + "INFO Engine 000: Iteration(100): 0 co"))
    assert [i.number for i in found] == [0, 1, 2, 3, 4, 99]
    assert found[-1].dummy
    steps = as_step_log(found, 600).steps
    assert steps[0].prefill == ((64, 0),)
    assert [s.decode_context_tokens for s in steps] == [0, 600, 1200, 1800, 2400]
    assert steps[1].gap_ms == 7.25


def test_clients_agree_on_what_a_run_is(tmp_path):
    (a_name, a), *_ = read_served_runs(saved(tmp_path / "benchmarks.json", guidellm()))
    saved(tmp_path / "profile_export.jsonl", aiperf_requests())
    (_, b), *_ = read_served_runs(saved(tmp_path / "profile_export_aiperf.json", aiperf()))
    assert a_name == "benchmarks-benchmark-0"
    assert np.diff(a.start_s) == pytest.approx([1, 1])
    assert a.ttft_s == pytest.approx([0.100, 0.101, 0.102])
    assert b.start_s == pytest.approx([0, 1])  # warm-up and failures left out
    for run in (a, b):
        assert set(run.input_tokens) == {512}
        assert set(run.output_tokens) == {190}
        assert (run.end_s - run.start_s) == pytest.approx([2.0] * len(run.start_s))
    assert a.metrics["P90 TTFT"] == 102.0
    assert b.metrics == pytest.approx(
        {
            "mean TTFT": 100.0,
            "median TTFT": 99.0,
            "P90 TTFT": 120.0,
            "P99 TTFT": 140.0,
            "mean TPOT": 10.0,
            "median TPOT": 10.0,
            "P90 TPOT": 11.0,
            "P99 TPOT": 12.0,
            "output throughput": 321.0,
        }
    )
    assert len(read_served_runs(h200.SERVED_RUNS["r4"])[0][1].start_s) > 50


@pytest.mark.parametrize("unit", ["ms", "us", "sec"])
def test_a_stated_unit_is_converted(tmp_path, unit):
    saved(tmp_path / "profile_export.jsonl", aiperf_requests())
    (_, run), *_ = read_served_runs(saved(tmp_path / "profile_export_aiperf.json", aiperf(unit)))
    assert run.metrics["mean TTFT"] == pytest.approx(100.0)


CONCURRENT = {"type": "concurrency", "kind": "profiling", "name": "profiling", "concurrency": 1}
WARMUP = {**CONCURRENT, "kind": "warmup", "name": "warmup", "concurrency": 8}


@pytest.mark.parametrize(
    ("strategy", "phases", "clients"),
    [
        ({"type_": "synchronous"}, [CONCURRENT], 1),
        ({"type_": "concurrent", "streams": 1}, [WARMUP, CONCURRENT], 1),
        ({"type_": "throughput", "max_concurrency": 1}, [CONCURRENT], 1),
        ({"type_": "throughput", "max_concurrency": None}, [CONCURRENT | {"concurrency": 2}], None),  # none waits
        ({"type_": "concurrent", "streams": 3}, [CONCURRENT, CONCURRENT], None),
        ({"type_": "constant", "rate": 5.0, "max_concurrency": 1}, [CONCURRENT | {"type": "poisson"}], None),
    ],
)
def test_a_closed_loop_says_so_whoever_sent_it(tmp_path: Path, strategy, phases, clients) -> None:
    report = changed(guidellm(), benchmarks__0__config={"strategy": strategy})
    (_, a), *_ = read_served_runs(saved(tmp_path / "benchmarks.json", report))
    saved(tmp_path / "profile_export.jsonl", aiperf_requests())
    summary = aiperf() | {"input_config": {"phases": phases}}
    (_, b), *_ = read_served_runs(saved(tmp_path / "profile_export_aiperf.json", summary))
    assert (a.concurrency, b.concurrency) == (clients, clients)


def test_a_scrape_adds_up_over_engines_and_two_give_what_lies_between():
    first = parse_metrics(prometheus(), "a")
    later = parse_metrics(prometheus(scale=3), "b")
    assert (first.engines, first.running, first.kv_usage) == (("0", "1"), 6, 0.25)
    assert first.histograms["TTFT"].count == 16
    assert first.histograms["TTFT"].mean == pytest.approx(0.2)
    assert first.histograms["TTFT"].quantile(0.5) == pytest.approx(0.1 + 0.1 * 3 / 4)
    between = later.since(first)
    assert between.generation_tokens == 2 * first.generation_tokens
    assert between.histograms["E2E"].mean == pytest.approx(first.histograms["E2E"].mean)
    with pytest.raises(ValueError, match="restarted"):
        first.since(later)


# -- the gate before operator tables -----------------------------------------------------------------------------------
def gemm_columns(gap_ms: float, dtype: str = "fp8_block") -> dict[str, list[Any]]:
    gpu = GPUS["gb300"]
    shapes = [(m, n, k) for m in (1, 4096) for n in (1024, 65536) for k in (1024, 8192)]
    rows = [Gemm(dtype=dtype, m=m, n=n, k=k, ms=1.0) for m, n, k in shapes]
    ms = [1.3 * r.roofline_ms(gpu) + gap_ms for r in rows]
    return {"gemm_dtype": [dtype] * len(rows), "m": [r.m for r in rows], "n": [r.n for r in rows],
            "k": [r.k for r in rows], "latency": ms}  # fmt: skip


def test_a_family_that_holds_host_gaps_is_dropped_and_said():
    gpu = GPUS["gb300"]
    bad = plausible(gemms_of(gemm_columns(0.108), "t"), gpu)
    assert bad.rows == ()
    assert "fp8_block: 8 rows on gb300" in bad.dropped[0]
    good = plausible(gemms_of(gemm_columns(0.004), "t"), gpu)
    assert len(good.rows) == 8
    assert good.dropped == ()
    assert 0.5 < efficiencies(good, gpu)["fp8_block"]["flop"] < 1 / 1.3 + 0.01


def test_rows_faster_than_the_hardware_are_dropped():
    columns = gemm_columns(0.004)
    columns["latency"][0] = 1e-5
    found = plausible(gemms_of(columns, "t"), GPUS["gb300"])
    assert len(found.rows) == 7
    assert "1 rows on gb300: faster than the hardware" in found.dropped[0]


def test_the_installed_tables_pass_the_gate_but_for_fp8_blocks_on_blackwell():
    pytest.importorskip("aiconfigurator_core", reason="the optional tables are not installed")
    from rackplan.calibration.readers.aiconfigurator import read_gemms

    assert any("fp8_block" in line for line in read_gemms("gb300").dropped)
    assert read_gemms("h200").dropped == ()


def test_the_command_names_what_is_missing_or_shows_the_shares(capsys, monkeypatch):
    from rackplan.calibration.readers import aiconfigurator

    assert execute(app, "rackplan", ["calibration", "operators", "h100"]) == 2
    assert "gpu=h100: has no table" in capsys.readouterr().err
    columns = [gemm_columns(0.004, "nvfp4"), gemm_columns(0.108, "fp8_block")]
    table = plausible([row for c in columns for row in gemms_of(c, "t")], GPUS["gb300"])
    monkeypatch.setattr(aiconfigurator, "read_gemms", lambda gpu: table)
    assert execute(app, "rackplan", ["calibration", "operators", "gb300"]) == 0
    shown = capsys.readouterr().out
    assert "nvfp4" in shown
    assert "Dropped: fp8_block" in shown


# -- bad files ---------------------------------------------------------------------------------------------------------
Reader = Callable[[Path], Any]
READERS: dict[str, tuple[str, Any, Reader]] = {
    "bench_forward": ("f.json", forward_json(), read_bench_forward),
    "forward_log": ("f.log", LOG, lambda p: read_forward_log(p, CASES, 1)),
    "iterations": ("server.log", iterations(), read_iteration_log),
    "guidellm": ("benchmarks.json", guidellm(), read_served_runs),
    "aiperf": ("profile_export_aiperf.json", aiperf(), read_served_runs),
    "prometheus": ("metrics.txt", prometheus(), lambda p: read_metrics(str(p))),
}


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
def test_a_cut_or_garbled_file_is_one_line_or_whole_records(tmp_path_factory, name, data):
    file, content, read = READERS[name]
    folder = tmp_path_factory.mktemp("bad")
    saved(folder / "profile_export.jsonl", aiperf_requests())
    text = content if isinstance(content, str) else json.dumps(content)
    at = data.draw(st.integers(0, len(text)))
    garbage = data.draw(st.sampled_from(["", "NaN", "Infinity", "null", '"', "\x00", "{", "1e999"]))
    rest = data.draw(st.sampled_from(["", text[at + 1 :]]))
    path = saved(folder / file, text[:at] + garbage + rest)
    message = outcome(read, path)
    assert message is None or (str(folder) in message and "\n" not in message)


def outcome(read: Reader, path: Path) -> str | None:
    """The error's line; None where the file was read. Anything but an InputError fails the test."""
    try:
        read(path)
    except InputError as e:
        return str(e)
    return None


def changed(content: Any, **paths: Any) -> Any:
    """`content` with values at dotted paths replaced; `_missing` removes one."""
    copy = json.loads(json.dumps(content))
    for path, value in paths.items():
        *steps, last = (int(p) if p.isdigit() else p for p in path.split("__"))
        at = copy
        for step in steps:
            at = at[step]
        if value == "_missing":
            del at[last]
        else:
            at[last] = value
    return copy


def first(content: Any, **paths: Any) -> Any:
    return changed(content, **{f"0__{k}": v for k, v in paths.items()})


def request(**values: Any) -> Any:
    return changed(guidellm(), **{f"benchmarks__0__requests__successful__1__{k}": v for k, v in values.items()})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bench_forward", first(forward_json(), median_us=float("nan")), r"f.json:0: median_us='nan' is not a number"),
        ("bench_forward", first(forward_json(), median_us=0.0052), r"f.json:0: median_us=0.0052 must be at least 10"),
        ("bench_forward", first(forward_json(), ranks=[]), "f.json:0: ranks is empty"),
        ("bench_forward", first(forward_json(), requests="_missing"), "f.json:0: requests is a NoneType"),
        ("bench_forward", first(forward_json(), ranks__0__routing="zipf"), "--routing balanced"),
        ("bench_forward", {"results": []}, "holds a dict, not a list of cases"),
        ("forward_log", LOG.replace("32 tokens", "64 tokens"), "f.log:2: case decode ran 32 requests of 64 tokens"),
        ("forward_log", LOG.replace("5200.0 us", "nan us"), "f.log:2: median='nan' is not a number"),
        ("forward_log", LOG.replace("decode: 32", "other: 32"), "f.log:2: case other was not given"),
        ("forward_log", LOG.replace("us, sample spread 0.40%", "us"), "f.log:2: .*not a whole result"),
        ("iterations", iterations().replace("7.25 ms", "7250000 ms", 1), "server.log:2: elapsed time=7250000 must be"),
        ("iterations", "INFO started\n", "logs no iteration"),
        ("guidellm", changed(guidellm(), metadata__version=3), "metadata.version=3 is unknown"),
        ("guidellm", request(request_latency=0.002), r"benchmarks.json:0.1: .*units are mixed"),
        ("guidellm", request(prompt_tokens=None), r"benchmarks.json:0.1: prompt_tokens is missing"),
        ("aiperf", changed(aiperf(), schema_version="2.0"), "schema_version=2.0 is unknown"),
        ("aiperf", changed(aiperf(), time_to_first_token__unit="minutes"), "unit='minutes' is no time"),
        ("aiperf", changed(aiperf(), output_token_throughput__unit="tokens/min"), "is not tokens/sec"),
        ("prometheus", prometheus().replace("vllm:kv_cache", "vllm:gpu_cache"), "vllm:kv_cache_usage_perc is missing"),
        ("prometheus", prometheus((5, 1, 8, 8)), "do not grow"),
        ("prometheus", "up 1\n", "vllm:num_requests_running is missing"),
    ],
)
def test_a_bad_value_is_named_with_file_and_row(tmp_path, name, content, message):
    file, _, read = READERS[name]
    saved(tmp_path / "profile_export.jsonl", aiperf_requests())
    with pytest.raises(InputError, match=message):
        read(saved(tmp_path / file, content))


def test_a_truncated_gzip_and_an_engine_out_of_reach_are_named(tmp_path):
    path = tmp_path / "run.json.gz"
    path.write_bytes(gzip.compress(b"{}" * 1000)[:-20])
    with pytest.raises(InputError, match="truncated or damaged gzip"):
        read_served_runs(path)
    with pytest.raises(InputError, match="cannot be reached"):
        read_metrics("http://127.0.0.1:9/metrics")


def test_requests_of_aiperf_must_lie_beside_its_summary(tmp_path):
    with pytest.raises(InputError, match=r"profile_export.jsonl: cannot be read .*holds the requests to replay"):
        read_served_runs(saved(tmp_path / "profile_export_aiperf.json", aiperf()))

"""Shapes of a profile: within the limits, without repeats, and telling however early the profile is cut; its loads."""

from hypothesis import given
from hypothesis import strategies as st

from rackplan.calibration.readers.forward_csv import forward_rows
from rackplan.engine.forward_table import append_row, row_of
from rackplan.engine.profile import ProfileRequest
from rackplan.engine.profile_cases import ForwardCase, Limits, extremes_first, forward_cases, powers_of_two
from rackplan.engine.profile_run import Profiler

LIMITS = st.builds(
    Limits,
    batched_tokens=st.integers(64, 65536),
    seqs=st.integers(1, 1024),
    kv_tokens=st.integers(1024, 4_000_000),
    model_len=st.integers(256, 200_000),
)
H200 = Limits(batched_tokens=16384, seqs=512, kv_tokens=3_000_000, model_len=65536)


@given(limits=LIMITS)
def test_every_case_is_within_the_limits_and_named_once(limits):
    cases = forward_cases(limits)
    assert all(limits.allow(c) for c in cases)
    assert len({c.name for c in cases}) == len(cases)


@given(values=st.lists(st.integers(1, 1000), min_size=1, max_size=30))
def test_extremes_first_keeps_all_and_begins_with_both_ends(values):
    order = extremes_first(values)
    assert sorted(order) == sorted(set(values))
    assert set(order[:2]) == {min(values), max(values)}


def test_the_first_twelve_cases_span_batch_context_and_chunk():
    first = forward_cases(H200)[:12]
    decodes = [c for c in first if c.phase == "decode"]
    assert {c.phase for c in first} == {"decode", "prefill", "mixed"}
    assert min(c.decode_batch for c in decodes) == 1
    assert max(c.decode_batch for c in decodes) == 512
    assert max(c.decode_kv_len for c in decodes) > 16 * min(c.decode_kv_len for c in decodes)
    fresh = [c.new_tokens for c in first if c.phase == "prefill" and not c.context_tokens]
    assert max(fresh) == 16384
    assert min(fresh) == 64
    assert any(c.context_tokens for c in first)


def test_cases_are_written_as_the_engine_reads_them():
    assert ForwardCase(decode_batch=4, decode_kv_len=1024).argument == "decode_4_1024=4*1@1024"
    assert ForwardCase(new_tokens=512).argument == "prefill_512=512@512"
    assert ForwardCase(new_tokens=512, context_tokens=1024).argument == "hit_512_1024=512@1536"
    mixed = ForwardCase(new_tokens=512, decode_batch=16, decode_kv_len=4096)
    assert mixed.argument == "mix_512_16_4096=512@512,16*1@4096"
    assert mixed.kv_tokens == 512 + 16 * 4096
    several = ForwardCase(chunks=4, new_tokens=1024, context_tokens=512, decode_batch=8, decode_kv_len=64)
    assert several.argument == "mix_4x1024_512_8_64=4*1024@1536,8*1@64"
    assert ForwardCase(chunks=2, new_tokens=64).argument == "prefill_2x64=2*64@64"
    assert several.kv_tokens == 4 * 1536 + 8 * 64


def test_a_table_of_cases_is_read_back_as_they_were(tmp_path):
    """What is timed and what is fitted are one shape, whatever its chunks, hits and decodes."""
    cases = forward_cases(H200)
    for case in cases:
        append_row(tmp_path / "forward_dep1.csv", row_of(case, 1, 1000.0, 0.5))
    rows = forward_rows(tmp_path / "forward_dep1.csv")
    assert any(row.batch.chunks > 1 for row in rows)
    for case, row in zip(cases, rows, strict=True):
        b = row.batch
        assert [(b.new_tokens, b.new_tokens + b.cached_tokens)] * b.chunks == case.requests[: b.chunks]
        assert [(1, b.context_tokens)] * b.decodes == case.requests[b.chunks :]


def test_every_kind_of_several_chunks_is_among_the_first_forty():
    several = [c for c in forward_cases(H200)[:40] if c.chunks > 1]
    assert any(not c.context_tokens and not c.decode_batch for c in several)
    assert any(c.context_tokens for c in several)
    assert any(c.decode_batch for c in several)


def test_powers_end_with_the_last():
    assert powers_of_two(64, 1000) == [64, 128, 256, 512, 1000]
    assert powers_of_two(64, 64) == [64]
    assert powers_of_two(64, 32) == []


def test_rates_are_served_in_turns_and_one_rank_has_a_burst_and_short_prompts(tmp_path):
    request = ProfileRequest(
        model="deepseek-v2-lite", gpu="h200", gpus=2, python="python", engine_version="0.33", budget_s=60, repeats=3
    )
    (tmp_path / "serve_x_pilot.json").write_text('{"request_throughput": 20.0}')
    profiler = Profiler(request, tmp_path, print)
    one = {name: make() for name, make in profiler._loads("x", request.aggregated(1)).items()}
    first, again = ["x_pilot", "x_load0", "x_load1", "x_burst", "x_short"], ["x_load0_2", "x_load1_2"]
    assert list(one) == [*first, *again, "x_load0_3", "x_load1_3"]
    assert {one[f"x_load0{n}"].rate_req_s for n in ("", "_2", "_3")} == {7.0}
    assert (one["x_burst"].concurrency, one["x_burst"].prompts) == (64, 64)
    captured = request.aggregated(1).pools[0].max_cudagraph_capture_size
    assert one["x_short"].input_tokens < captured < one["x_load0"].input_tokens == 2048
    two = profiler._loads("x", request.aggregated(2))
    assert not {"x_burst", "x_short"} & set(two)

"""The exact batches' own language and file; the engine's side is tested in tests_engine/."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackplan.engine.errors import InputError
from rackplan.engine.forward_table import COLUMNS, append_row, done_cases, row_of
from rackplan.engine.vllm_plugin import exact_batches
from rackplan.engine.vllm_plugin.exact_batches import main, parse_case


@given(
    chunks=st.integers(1, 9),
    new=st.integers(2, 4096),
    context=st.integers(0, 5000),
    batch=st.integers(0, 600),
    kv=st.integers(2, 9000),
)
def test_a_case_counts_every_request_and_token_once(chunks, new, context, batch, kv):
    decodes = f",{batch}*1@{kv}" if batch else ""
    case = parse_case(f"c={chunks}*{new}@{new + context}{decodes}")
    assert (case.chunks, case.new_tokens, case.context_tokens) == (chunks, new, context)
    assert case.requests == [(new, new + context)] * chunks + [(1, kv)] * batch
    assert case.tokens == sum(tokens for tokens, _ in case.requests) == chunks * new + batch
    row = dict(zip(COLUMNS, row_of(case, 2, 12.5, 1.0), strict=True))
    assert (row["requests_per_rank"], row["tokens_per_rank"]) == (len(case.requests), case.tokens)
    assert row["phase"] == ("mixed" if batch else "prefill")


@given(batch=st.integers(1, 600), kv=st.integers(2, 9000))
def test_single_tokens_with_a_context_are_decodes(batch, kv):
    case = parse_case(f"c={batch}*1@{kv}")
    assert (case.decode_batch, case.decode_kv_len, case.phase) == (batch, kv, "decode")


@pytest.mark.parametrize(
    "text",
    ["", "c", "c=", "=256", "c=x", "c=0", "c=256@128", "c=2*", "c=-1", "c=256c", "c=4:2", "c=256,512", "c=2*256,128",
     "c=8*1@512,4*1@256", "c=1.5"],
)  # fmt: skip
def test_a_case_that_is_no_such_batch_is_refused_by_name(text):
    with pytest.raises(InputError, match="--case"):
        parse_case(text)


def test_rows_are_appended_under_one_heading_and_read_back(tmp_path):
    path = tmp_path / "new" / "forward.csv"
    assert done_cases(path) == set()
    for text in ("a=256", "b=4*1@512"):
        append_row(path, row_of(parse_case(text), 1, 1000.0, 2.0))
    assert done_cases(path) == {"a", "b"}
    assert [row["median_us"] for row in csv.DictReader(path.open())] == ["1000.0"] * 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--case", "a=256", "--case", "a=512"], "given twice"),
        (["--case", "a=256", "--ranks", "0"], "at least 1"),
        (["--case", "a=256"], "no config.json"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(args, says, tmp_path, capsys):
    assert main(["--model", str(tmp_path), "--out", str(tmp_path / "out.csv"), *args]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_another_csv_is_not_appended_to(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "other.csv"
    out.write_text("a,b\n1,2\n")
    assert main(["--model", str(tmp_path), "--out", str(out), "--case", "a=256"]) == 2
    assert "is not the heading" in capsys.readouterr().err
    assert out.read_text() == "a,b\n1,2\n"


class Engine:
    """Stands for the engine's end of the calls: blocks of 128 tokens, and times that the test chooses."""

    def __init__(self, num_blocks):
        self.num_blocks, self.batches, self.stopped = num_blocks, [], False

    async def collective_rpc(self, method, args=()):
        if method == "kv_capacity":
            return [([128], self.num_blocks)]
        requests, count = args
        self.batches.append(requests)
        return [[100.0 + run for run in range(count)]]

    def shutdown(self, timeout):
        self.stopped = True


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def run(model, engine, monkeypatch, *cases):
    monkeypatch.setattr(exact_batches, "start_engine", lambda *args: engine)
    options = ["--model", str(model), "--out", str(model / "out.csv"), "--samples", "3", "--iters", "5"]
    return main([*options, *(part for case in cases for part in ("--case", case))])


def test_a_row_is_the_median_of_all_runs_and_the_range_of_the_samples_medians(model, monkeypatch):
    engine = Engine(100)
    assert run(model, engine, monkeypatch, "mix=256@512,2*1@300") == 0
    assert engine.stopped
    assert engine.batches == [[(256, 512), (1, 300), (1, 300)]]
    (row,) = csv.DictReader((model / "out.csv").open())
    assert float(row["median_us"]) == 107.0
    assert float(row["spread_pct"]) == pytest.approx(100 * (112 - 102) / 107, abs=0.01)


def test_only_cases_that_the_file_lacks_are_run(model, monkeypatch):
    engine = Engine(100)
    for cases in (["a=16"], ["a=16", "b=32"], ["b=32"]):
        assert run(model, engine, monkeypatch, *cases) == 0
    assert engine.batches == [[(16, 16)], [(32, 32)]]


def test_a_case_that_does_not_fit_is_refused_before_any_is_run(model, monkeypatch, capsys):
    engine = Engine(9)  # one of them is vLLM's own
    assert run(model, engine, monkeypatch, "fits=8*1@128") == 0
    assert run(model, engine, monkeypatch, "small=16", "large=8*1@129") == 2
    assert "--case large: needs 17 KV blocks, the engine has 9" in capsys.readouterr().err
    assert engine.stopped
    assert done_cases(model / "out.csv") == {"fits"}

"""What a calibration could not tell, and the run that would: what a profile should measure next."""

from typing import NamedTuple

from rackplan.calibration.file import CalibrationFile

LEAST_DECODE_BATCH, LEAST_CONTEXT, LEAST_CHUNK = 128, 16_384, 8_192
"""What serving reaches on most deployments: a range that ends below is worth a wider one."""


class MissingRun(NamedTuple):
    """One run to make: how, why, and the terms that it tells."""

    run: str
    why: str
    terms: tuple[str, ...]


_RUNS = (
    MissingRun(
        "exact batches on 2 ranks or more, expert parallel (forward_dep2)",
        "dispatch and combine between ranks are carried per layer, their rate as a share of the link",
        ("link_efficiency", "comm_fixed_ms"),
    ),
    MissingRun(
        "served loads of 2 ranks and of 4, same load a rank, async scheduling off",
        "the CPU all-reduce of each step is carried; two widths tell a ring's hops from rounds",
        ("ring_hop_ms", "doubling_round_ms", "nccl_sync_ms"),
    ),
    MissingRun(
        "a served load of one rank with async scheduling off and the step log on",
        "host time is hidden under the GPU step otherwise",
        ("host_step_ms", "host_request_ms"),
    ),
    MissingRun(
        "an aggregated load of one rank at a third of its capacity, --save-detailed",
        "the front end is what clients wait beyond the engine",
        ("frontend_ms",),
    ),
    MissingRun(
        "an aggregated load of one rank with the step log on, client on the same machine, prompts of one length",
        "client and log share a clock: what the front end works on each token, and requests wait for it",
        ("frontend_token_ms", "frontend_turn_ms"),
    ),
    MissingRun(
        "bursts of 64 and of 256 requests at once on one rank, step log on, client on the same machine",
        "how a front end takes in many requests was seen by pairs that met, which says less of hundreds",
        ("frontend_turn_ms",),
    ),
    MissingRun(
        "exact batches of two chunks or more a rank (four of 2,048 tokens, and with one half cached)",
        "what a chunk beside others costs was seen in served steps alone, where launches hide it",
        ("prefill_chunk_ms",),
    ),
    MissingRun(
        "an aggregated load of one rank, prompts past the captured sizes, 60 of them or more beside decodes",
        "launches of eager steps, what tokens add, and their spread, decide TTFT where the host is slow",
        ("eager_floor_ms", "eager_token_launch_ms", "launch_quantiles"),
    ),
    MissingRun(
        "an aggregated load of one rank whose prompts fit the captured sizes (capture size 4096, prompts of 2048)",
        "launches of prompts in CUDA graphs were seen with short prompts only, or not at all",
        ("piecewise_floor_ms",),
    ),
    MissingRun(
        "1 prefill + 1 decode instance at three rates",
        "KV hand-over: three rates tell what waits for engine steps from what is constant; the prefill server shows a "
        "prompt's launch alone",
        ("transfer", "eager_decode_launch_ms"),
    ),
    MissingRun(
        "an aggregated load of 2 ranks, expert parallel, prompts past the captured sizes",
        "launches with experts spread take longer, by a part that is carried",
        ("eager_ep_launch_ms",),
    ),
    MissingRun("decode batches at two KV lengths or more", "reads of KV are carried", ("kv_read_efficiency",)),
    MissingRun(
        "prefix-hit prefills: 64 new tokens and more after 4,096 to 32,768 cached ones",
        "the cost of cached context in prefill is unknown, or that of short chunks, which take another way",
        ("prefill_context_ms", "short_chunk_pairs"),
    ),
    MissingRun("prefills of five lengths or more", "causal and cached pairs are taken alike", ("prefill_causal_ms",)),
    MissingRun(
        "30 exact batches or more", "how sharply reads and arithmetic overlap is carried", ("roofline_sharpness",)
    ),
    MissingRun(
        "served decode steps of real weights, one rank, async scheduling on",
        "exact batches route evenly; how skewed served text is, is unknown",
        ("routing_sigma",),
    ),
    MissingRun(
        "a decode server that admits prompts of 100K tokens and more, step log on",
        "the host's work of an admission is carried from published figures",
        ("admission_token_ms",),
    ),
)


def missing_runs(file: CalibrationFile) -> list[MissingRun]:
    """Runs that would tell what `file` had to carry, most telling first; then wider ranges of exact batches."""
    carried = set(file.carried)
    found = []
    for run in _RUNS:
        if terms := tuple(t for t in run.terms if t in carried):
            found.append(run._replace(terms=terms))
    return [*found, *_wider(file)]


def _wider(file: CalibrationFile) -> list[MissingRun]:
    decode, prefill = file.measured["decode"], file.measured["prefill"]
    ranges = (
        (decode.batch[1], LEAST_DECODE_BATCH, "decode batches", "requests"),
        (decode.context_tokens[1], LEAST_CONTEXT, "decode contexts", "tokens"),
        (prefill.new_tokens[1], LEAST_CHUNK, "prefill chunks", "new tokens"),
    )
    return [
        MissingRun(
            f"exact batches with {what} up to {least:,} {unit}",
            f"the profile ends at {most:,}; beyond it is extrapolated by physics, at twice the error",
            (),
        )
        for most, least, what, unit in ranges
        if most < least
    ]

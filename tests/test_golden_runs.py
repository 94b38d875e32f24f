"""Small random runs give what they gave before, to the nanosecond. Only exact arithmetic and Python's own random
numbers are in them, so the digests hold on every machine and with every numpy.

Where a change is meant to change results, write the digests anew: python tests/test_golden_runs.py
"""

import json
from pathlib import Path

import pytest
from random_runs import digest_of, random_run

FILE = Path(__file__).parent / "golden_runs.json"
TRIED = 80
GOLDEN: dict[str, str] = json.loads(FILE.read_text()) if FILE.is_file() else {}


@pytest.mark.parametrize("seed", list(GOLDEN))
def test_a_random_run_gives_what_it_gave_before(seed: str) -> None:
    assert digest_of(random_run(int(seed)))["integers"] == GOLDEN[seed]


def test_every_kind_of_event_is_in_them() -> None:
    results = [random_run(int(seed)) for seed in GOLDEN]
    assert sum(pool.preemptions for r in results for pool in r.pools) > 10
    assert sum(r.transfers for r in results) > 500
    assert sum(r.transfer_wait_ns for r in results) > 0
    assert sum(int(r.cached_tokens.sum()) for r in results) > 1000


if __name__ == "__main__":
    runs = {seed: random_run(seed) for seed in range(TRIED)}
    # With drafts, acceptance is drawn by numpy.
    exact = {seed: run for seed, run in runs.items() if not run.deployment.speculation.draft_tokens}
    FILE.write_text(json.dumps({seed: digest_of(run)["integers"] for seed, run in exact.items()}, indent=0) + "\n")

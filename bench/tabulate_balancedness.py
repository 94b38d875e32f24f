"""Sample the balancedness of the embedded calibrations' models and drafts over widths, EPLB and tokens, for
simulator/data.

    python bench/tabulate_balancedness.py            takes some minutes
"""

import json
from pathlib import Path

from rackplan.calibration.library import list_calibrations, load_calibration
from rackplan.engine import model_spec
from rackplan.simulator.expert_load import LONG_WINDOW_STEPS, Balancing, ExpertLoad, sample_balancedness, table_key
from rackplan.tuner.space import REDUNDANT, WIDTHS

OUT = Path(__file__).resolve().parent.parent / "simulator" / "data" / "balancedness.json"
TOKENS_PER_GPU_OCTAVES = (0, 16)


def rows_of(load: ExpertLoad) -> dict[str, dict[str, float]]:
    """Of one part of a model: balancedness by bucket of tokens, for each width and number of redundant experts."""
    table = {}
    for gpus in WIDTHS[1:]:
        for redundant in REDUNDANT:
            if (load.experts + max(0, redundant)) % gpus:
                continue
            balancing = None
            if redundant >= 0:
                balancing = Balancing(
                    redundant_experts=redundant, window_steps=LONG_WINDOW_STEPS, interval_steps=LONG_WINDOW_STEPS
                )
            first = 2 * (TOKENS_PER_GPU_OCTAVES[0] + gpus.bit_length() - 1)
            last = 2 * (TOKENS_PER_GPU_OCTAVES[1] + gpus.bit_length() - 1)
            table[table_key(load, gpus, balancing)] = {
                str(b): round(sample_balancedness(load, gpus, balancing, b), 5) for b in range(first, last + 1)
            }
    return table


def main() -> None:
    table: dict[str, dict[str, float]] = {}
    for row in list_calibrations():
        file = load_calibration(row["name"]).file
        model = model_spec(file.model, file.gpu)
        table |= rows_of(
            ExpertLoad(
                experts=model.routed_experts, top_k=model.top_k, layers=model.moe_layers, skew_sigma=file.target_sigma
            )
        )
        draft = model.draft
        if draft and file.draft_sigma:
            table |= rows_of(
                ExpertLoad(
                    experts=draft.experts, top_k=draft.top_k, layers=draft.layers, skew_sigma=file.draft_sigma
                )
            )
    OUT.write_text(json.dumps(table, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

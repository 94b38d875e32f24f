"""What can be searched: layouts (pools, widths, counts) and knobs, and how they make a `Deployment`.

A layout is enumerated, screened in closed form and then offered to the search by its label; the knobs are the search's.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rackplan.engine import Deployment, GpuSpec, InputError, ModelSpec, gpu_spec, parse_deployment
from rackplan.engine.flags import dp_sync_algorithm, engine_release, kv_transfer_modes

WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = (2048, 4096, 8192, 16384, 32768)
SEATS = (32, 64, 128, 256, 512)
CAPS = (0, 2, 4, 8)
"""New KV loads per step; 0 is no cap."""
REDUNDANT = (-1, 0, 16, 32, 64)
"""Redundant experts; -1 is EPLB off."""
INTERVALS = (1000, 3000, 10000)
WINDOWS = (500, 1000)


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Layout:
    """Instances and their widths. An aggregated layout has prefill_instances = 0 and `decode` as its only pool."""

    prefill_instances: int
    prefill_dep: int
    decode_instances: int
    decode_dep: int

    @property
    def disaggregated(self) -> bool:
        return self.prefill_instances > 0

    @property
    def ranks(self) -> int:
        """Ranks of the widest instance."""
        return max(self.prefill_dep if self.disaggregated else 1, self.decode_dep)

    @property
    def gpus(self) -> int:
        return self.prefill_instances * self.prefill_dep + self.decode_instances * self.decode_dep

    @property
    def label(self) -> str:
        tail = f"{self.decode_instances} x DEP{self.decode_dep}"
        if not self.disaggregated:
            return f"{tail} aggregated"
        return f"{self.prefill_instances} x DEP{self.prefill_dep} prefill + {tail} decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """Everything else that is searched. `chunk`: tokens of a prefill (or aggregated) step; `seats`: max_num_seqs."""

    chunk: int = 16384
    seats: int = 128
    cap: int = 4
    redundant: int = 32
    window: int = 1000
    interval: int = 3000
    drafts: int = 0
    mode: str = "push"


def make_deployment(model: str, gpu: str, layout: Layout, knobs: Knobs, max_model_len: int | None) -> Deployment:
    """The deployment of a layout with knobs. Raises InputError where they do not go together."""
    width = 1 + knobs.drafts
    device = gpu_spec(gpu).device
    pools: list[dict] = []
    if layout.disaggregated:
        pools.append(
            {
                "role": "prefill",
                "instances": layout.prefill_instances,
                "dep": layout.prefill_dep,
                "max_num_batched_tokens": knobs.chunk,
                "max_num_seqs": 256,
                # Replicas cost a prefill rank KV, and two to eight GPUs share prompts' tokens evenly without them.
                **({"redundant_experts": 0} if knobs.redundant > 0 else {}),
            }
        )
    decode_tokens = max(512, 1 << (knobs.seats * width - 1).bit_length())
    pools.append(
        {
            "role": "decode" if layout.disaggregated else "aggregated",
            "instances": layout.decode_instances,
            "dep": layout.decode_dep,
            "max_num_batched_tokens": decode_tokens if layout.disaggregated else max(knobs.chunk, decode_tokens),
            "max_num_seqs": knobs.seats,
            **({} if gpu_spec(gpu).eager else {"max_cudagraph_capture_size": min(4096, max(512, decode_tokens))}),
        }
    )
    if layout.disaggregated and knobs.cap:
        pools[-1]["max_new_kv_loads_per_step"] = knobs.cap
    data = {
        "model": model,
        "gpu": gpu,
        "pools": pools,
        "max_model_len": max_model_len,
        "eplb": {
            "enabled": knobs.redundant >= 0,
            "redundant_experts": max(0, knobs.redundant),
            "window_steps": knobs.window,
            "interval_steps": knobs.interval,
        },
        "speculation": {"draft_tokens": knobs.drafts},
        "kv_transfer": {"mode": knobs.mode} if layout.disaggregated else {},
        # Not searched: an engine has one.
        "dp_sync": {"algorithm": dp_sync_algorithm(device, engine_release(device))} if layout.ranks > 1 else {},
    }
    return parse_deployment(data, layout.label)


def fits_together(layout: Layout, knobs: Knobs, model: ModelSpec) -> bool:
    """Do the experts, replicas counted, divide over the layout's GPUs?"""
    redundant = max(0, knobs.redundant)
    draft = model.draft.experts + redundant if model.draft and knobs.drafts else 0
    if layout.disaggregated and model.routed_experts % layout.prefill_dep:
        return False
    return (model.routed_experts + redundant) % layout.decode_dep == 0 and draft % layout.decode_dep == 0


def simplified(layout: Layout, knobs: Knobs, gpu: GpuSpec) -> Knobs:
    """The knobs without those that have no effect on this layout, or that the GPU's engine has not, so that equal
    deployments are found equal."""
    modes = kv_transfer_modes(gpu.device)
    changes: dict = {} if knobs.mode in modes else {"mode": modes[0]}
    if layout.disaggregated is False:
        changes |= {"cap": 0, "mode": modes[0]}
    if layout.ranks == 1:
        changes |= {"redundant": -1}
    if changes.get("redundant", knobs.redundant) < 0:
        changes |= {"window": 1000, "interval": 3000}
    return replace(knobs, **changes)


def prefill_widths(gpu: GpuSpec) -> tuple[int, ...]:
    """DEP sizes of prefill instances that are searched: 8 GPUs at most."""
    return tuple(w for w in WIDTHS if w <= min(8, gpu.nvlink_domain_gpus))


def decode_widths(gpu: GpuSpec) -> tuple[int, ...]:
    """DEP sizes of decode and aggregated instances: what one NVLink domain holds."""
    return tuple(w for w in WIDTHS if w <= gpu.nvlink_domain_gpus)


def default_knobs(model: ModelSpec) -> Knobs:
    """Where searches start: as many drafts as the model takes, EPLB on."""
    return Knobs(drafts=model.max_draft_tokens)


def aggregated_layouts(gpu: GpuSpec, most_gpus: int) -> Iterator[Layout]:
    """One instance count per width: as many as fit."""
    for width in decode_widths(gpu):
        if width <= most_gpus:
            yield Layout(prefill_instances=0, prefill_dep=1, decode_instances=most_gpus // width, decode_dep=width)


def disaggregated_layouts(gpu: GpuSpec, most_gpus: int, rates: dict[tuple[str, int], float]) -> Iterator[Layout]:
    """For each pair of widths and each number of decode instances, the prefill counts around the balance of `rates`
    (req/s of one instance by role and width) that fit in `most_gpus`."""
    for p in prefill_widths(gpu):
        for d in decode_widths(gpu):
            prefill, decode = rates.get(("prefill", p), 0.0), rates.get(("decode", d), 0.0)
            if not prefill or not decode:
                continue
            for decodes in _counts(most_gpus // d):
                balanced = decodes * decode / prefill
                room = (most_gpus - decodes * d) // p
                for prefills in {min(room, max(1, round(balanced * f))) for f in (0.8, 1.0, 1.25)}:
                    if prefills >= 1:
                        yield Layout(prefill_instances=prefills, prefill_dep=p, decode_instances=decodes, decode_dep=d)


def _counts(most: int) -> list[int]:
    """All counts up to 8, then in steps of an eighth: per GPU, larger multiples of a layout tell little new."""
    counts, count = [], 1
    while count <= most:
        counts.append(count)
        count += max(1, count // 8)
    return counts


def instances_for(rate_req_s: float, one_instance_req_s: float) -> int:
    """Instances that carry `rate_req_s`. Raises InputError for an instance that carries nothing."""
    if one_instance_req_s <= 0:
        raise InputError("an instance that meets no request cannot be multiplied to meet a rate")
    return max(1, -(-round(rate_req_s * 1e6) // round(one_instance_req_s * 1e6)))


def sized_layout(
    rate_req_s: float, *, decode_dep: int, decode_req_s: float, prefill_dep: int = 1, prefill_req_s: float | None = None
) -> Layout:
    """The fewest instances whose pools each carry `rate_req_s`, given the rates of one instance of each.

    Instances are whole, so a pool may have to take more GPUs than its tokens ask for. Without `prefill_req_s` the
    layout is aggregated. Raises InputError for an instance that carries nothing.
    """
    return Layout(
        prefill_instances=0 if prefill_req_s is None else instances_for(rate_req_s, prefill_req_s),
        prefill_dep=prefill_dep,
        decode_instances=instances_for(rate_req_s, decode_req_s),
        decode_dep=decode_dep,
    )

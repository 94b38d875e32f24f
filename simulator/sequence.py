"""A request inside one instance."""

from rackplan.simulator.request import Request


class Sequence:
    """`prompt_tokens`: what has to be in the KV cache before it decodes; `load_tokens`: what the router counts it with.

    `computed_tokens`: of its prompt in KV; `cached_tokens`: of its first prefill's hit; `shared_tokens`: of its hit,
    what others held when it was admitted; `generated_tokens`: made before it was preempted; `kv_elsewhere`: its
    prompt's KV is loaded from a prefill instance; `loaded_tokens`: of its prompt in KV once a load has ended, before it
    is admitted; `is_loading`: the load is under way; `place`: in its rank's order of admission.

    It decodes from `start_step` on, with a context of `start_context` there and `growth` tokens a step, until
    `finish_step`; `done_tokens`: decoded since it began to, before `start_step`; `start_place`: in its instance's order
    of starts. These and `place` have no value before they are known, `prefill_done_ns` where no instance may be lost.
    A plain class: two are made of each request, and a dataclass's many arguments cost more than its fields.
    """

    place: int
    start_step: int
    start_context: float
    growth: float
    finish_step: int
    done_tokens: float
    start_place: int
    prefill_done_ns: int

    __slots__ = (
        "cached_tokens",
        "computed_tokens",
        "done_tokens",
        "finish_step",
        "first_token_ns",
        "generated_tokens",
        "growth",
        "is_loading",
        "kv_elsewhere",
        "load_tokens",
        "loaded_tokens",
        "place",
        "preemptions",
        "prefill_done_ns",
        "prompt_tokens",
        "rank",
        "ready_ns",
        "request",
        "scheduled_ns",
        "shared_tokens",
        "start_context",
        "start_place",
        "start_step",
    )

    def __init__(
        self, request: Request, rank: int, ready_ns: int, prompt_tokens: int, load_tokens: int = 0
    ) -> None:
        self.request = request
        self.rank = rank
        self.ready_ns = ready_ns
        self.prompt_tokens = prompt_tokens
        self.load_tokens = load_tokens
        self.computed_tokens = self.cached_tokens = self.shared_tokens = 0
        self.loaded_tokens = self.generated_tokens = self.preemptions = 0
        self.kv_elsewhere = self.is_loading = False
        self.first_token_ns = self.scheduled_ns = -1

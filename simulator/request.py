"""A request, and the units of time."""

from dataclasses import dataclass

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


@dataclass(slots=True, eq=False)
class Request:
    """One request as the front end sees it. Tokens are counts, `arrival_ns` integer nanoseconds.

    Prefix reuse is stated in one of three ways: `session` >= 0 with `reuse_tokens` (the leading tokens that are the
    session's previous turn, or those of `prefix_session`, a session that begins alike), `hash_ids` (one id per
    `block_tokens` tokens of the prompt, equal ids meaning equal blocks behind equal prefixes), or `cached_tokens` (what
    a measured run hit, replayed as it was).
    """

    id: int
    arrival_ns: int
    input_tokens: int
    output_tokens: int
    session: int = -1
    reuse_tokens: int = 0
    prefix_session: int = -1
    hash_ids: tuple[int, ...] | None = None
    block_tokens: int = 512
    cached_tokens: int | None = None

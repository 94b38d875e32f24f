"""Which instance and rank a live request goes to: the simulator's policies, on what a router can see.

Pure: no clock, no network. Ranks of one instance are told apart, as vLLM takes the rank from a header.
"""

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rackplan.engine.deployment import RouterPolicy

CHARACTERS_PER_TOKEN = 4
"""Of text that nobody has tokenised: a factor. Prompts given as token ids are counted."""
BLOCK_TOKENS = 64
MOST_BLOCKS = 200_000
"""Blocks of prompts that are remembered: some 13 million tokens, 20 MB."""
MOST_SESSIONS = 200_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a router sees it. `tokens`: its length; `asked_tokens`: the most that may be generated; `blocks`:
    one digest a block of BLOCK_TOKENS, each of all the prompt up to its end, so that equal digests mean equal
    beginnings. `session`: as its client names it; `came_s`: when, on any clock."""

    tokens: int
    asked_tokens: int
    blocks: tuple[bytes, ...]
    session: str | None = None
    came_s: float = 0.0


def prompt_of(body: Mapping[str, Any], session: str | None = None, came_s: float = 0.0) -> Prompt:
    """The prompt of a completion's or a chat's body."""
    prompt = body.get("prompt", body.get("messages", ""))
    if isinstance(prompt, list) and prompt and all(isinstance(x, int) for x in prompt):
        units: Sequence[Any] = prompt
        size = BLOCK_TOKENS
        tokens = len(prompt)
    else:
        units = prompt if isinstance(prompt, str) else json.dumps(prompt)
        size = BLOCK_TOKENS * CHARACTERS_PER_TOKEN
        tokens = -(-len(units) // CHARACTERS_PER_TOKEN)
    blocks, digest = [], hashlib.blake2b(digest_size=8)
    for begin in range(0, len(units) - size + 1, size):
        digest.update(repr(units[begin : begin + size]).encode())
        blocks.append(digest.digest())
    asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    return Prompt(tokens, asked if isinstance(asked, int) else 0, tuple(blocks), session, came_s)


@dataclass(slots=True, eq=False)
class Backend:
    """One rank of one instance. `rank`: None where the instance has one. `requests`, `tokens`: in flight there."""

    url: str
    rank: int | None = None
    healthy: bool = True
    requests: int = 0
    tokens: int = 0


class PrefixHomes:
    """Where beginnings of prompts were last sent; the oldest are forgotten first."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self.most_blocks = most_blocks
        self._home: OrderedDict[bytes, Backend] = OrderedDict()

    def find(self, prompt: Prompt) -> tuple[Backend | None, int]:
        """The backend that has the longest beginning of `prompt`, and that beginning's tokens; (None, 0) if none."""
        for i in range(len(prompt.blocks) - 1, -1, -1):
            if home := self._home.get(prompt.blocks[i]):
                return home, (i + 1) * BLOCK_TOKENS
        return None, 0

    def remember(self, prompt: Prompt, backend: Backend) -> None:
        """`backend` computes `prompt` now."""
        for block in prompt.blocks:
            self._home[block] = backend
            self._home.move_to_end(block)
        while len(self._home) > self.most_blocks:
            self._home.popitem(last=False)


class SessionHomes:
    """Where sessions were last sent, and when; the one unused for longest is forgotten first."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._home: OrderedDict[str, tuple[Backend, float]] = OrderedDict()

    def find(self, prompt: Prompt) -> Backend | None:
        """The backend of the prompt's session, unless that has sent nothing for too long."""
        home, used_s = self._home.get(prompt.session or "", (None, 0.0))
        late = self.timeout_s is not None and prompt.came_s - used_s > self.timeout_s
        return None if late else home

    def remember(self, prompt: Prompt, backend: Backend) -> None:
        """The prompt's session is on `backend` from now on."""
        if prompt.session:
            self._home[prompt.session] = backend, prompt.came_s
            self._home.move_to_end(prompt.session)
            if len(self._home) > MOST_SESSIONS:
                self._home.popitem(last=False)


class Balancer:
    """Chooses among healthy backends by policy; ties go to the first, as in the simulator. `draw(n)`: one of the
    numbers below n at random."""

    def __init__(
        self,
        backends: list[Backend],
        policy: RouterPolicy,
        affinity_timeout_s: float | None = None,
        draw: Callable[[int], int] = random.randrange,
    ) -> None:
        self.backends, self.policy, self._draw = backends, policy, draw
        self._homes, self._sessions = PrefixHomes(), SessionHomes(affinity_timeout_s)
        self._turn = -1

    def choose(self, prompt: Prompt) -> Backend | None:
        """The backend of a request; None where none is healthy."""
        well = [b for b in self.backends if b.healthy]
        if not well:
            return None
        if self.policy == "round_robin":
            self._turn += 1
            return well[self._turn % len(well)]
        if self.policy == "random":
            return well[self._draw(len(well))]
        if self.policy == "session_affinity":
            return self._by_session(prompt, well)
        if self.policy == "least_requests":
            return min(well, key=lambda b: b.requests)
        least = min(well, key=lambda b: b.tokens)
        if self.policy == "least_tokens":
            return least
        return self._by_prefix(prompt, least)

    def _by_session(self, prompt: Prompt, well: list[Backend]) -> Backend:
        home = self._sessions.find(prompt)
        chosen = home if home is not None and home.healthy else well[self._draw(len(well))]
        self._sessions.remember(prompt, chosen)
        return chosen

    def _by_prefix(self, prompt: Prompt, least: Backend) -> Backend:
        """Home, unless its queue is longer by twice the prefix: leaving costs the prefix, and all behind it wait."""
        home, reuse_tokens = self._homes.find(prompt)
        stays = home is not None and home.healthy and home.tokens - least.tokens <= 2 * reuse_tokens
        chosen = home if stays and home is not None else least
        self._homes.remember(prompt, chosen)
        return chosen

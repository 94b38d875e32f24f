"""How often Python looks for objects that refer to one another in a circle."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def rare_collections() -> Iterator[None]:
    """Have it look seldom: a run makes millions of objects, and so does reading requests, keeps many and makes few
    circles."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)

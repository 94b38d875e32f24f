"""Whether Python looks for objects that refer to one another in a circle."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collections() -> Iterator[None]:
    """Have it not look: a run makes millions of objects, and so does reading requests, keeps many and makes no circles.
    """
    looks = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if looks:
            gc.enable()

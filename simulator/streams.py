"""Named random streams, seeded apart: changing how one is used leaves the others' draws as they were."""

import zlib

import numpy as np


class Streams:
    """`streams["arrivals"]` is a numpy Generator that depends on the seed and the name alone.

    Two deployments run with one seed meet the same arrivals and lengths (common random numbers).
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._made: dict[str, np.random.Generator] = {}

    def __getitem__(self, name: str) -> np.random.Generator:
        if name not in self._made:
            self._made[name] = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        return self._made[name]

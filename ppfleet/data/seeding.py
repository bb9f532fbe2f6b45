"""Random numbers for data: generators seeded for each sample, and Paddle's own left as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import paddle

from ppfleet.data.sampler import mix
from ppfleet.distributed import devices


def seed_everything(number: int) -> None:
    """Seed what data sets and augmentation draw from: `random`, `numpy.random` and Paddle's generators."""
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    for generator in devices.current().generators():
        generator.manual_seed(number >> 33)


@contextmanager
def keep_generators() -> Iterator[None]:
    """Samples are drawn inside; afterwards Paddle's generators, which dropout uses as well, are as they were."""
    states = [(generator, generator.get_state()) for generator in devices.current().generators()]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def seed_all(seed: int, *progress: int) -> None:
    """Derive all random numbers from the seed and the progress of training: they are the same after a resume."""
    number = mix(seed, *progress)
    seed_everything(number)
    paddle.seed(number >> 33)

"""The share of the samples that runs by default."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

SEED = 2013
EIGHTH = 8

T = TypeVar("T")


def one_in(every: int, samples: Sequence[T], *, case: str) -> Sequence[T]:
    """Return one sample in ``every``, at least one, the same ones on every machine.

    case: its id, which with the seed decides at which sample to start.
    """
    if not samples:
        return samples
    start = random.Random(f"{SEED} {case}").randrange(min(every, len(samples)))
    return samples[start::every]

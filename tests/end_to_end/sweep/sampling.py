"""The share of the samples that runs by default."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

SEED = 2013
EIGHTH = 8
# Of one case. Where there are more than eight times as many, they are the product of a few options.
MOST = 16

T = TypeVar("T")


def one_in(every: int, samples: Sequence[T], *, case: str) -> Sequence[T]:
    """Return one sample in ``every``, at least one and at most ``MOST``; all of them for 1.

    The same ones on every machine, drawn, and not at equal distances: in a product of options, as
    databases list them, those of a distance of 8 would all have the same last options.

    case: its id, which with the seed decides.
    """
    if not samples or every == 1:
        return samples
    draw = random.Random(f"{SEED} {case}")
    share = len(range(draw.randrange(min(every, len(samples))), len(samples), every))
    chosen = draw.sample(range(len(samples)), min(share, MOST))
    return [samples[index] for index in sorted(chosen)]

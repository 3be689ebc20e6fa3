"""Which steps a meter verifies: a few early ones, then regular ones and some at random."""

from __future__ import annotations

import functools
import math
import random
from typing import Final

# Many runs are short. Work that a program does every k-th step is found where k divides one of
# these: each has more divisors than any smaller number. Programs count their steps from 1 or from
# 0, so that the next one is verified, too. Where data choose the cost, any two of them may differ.
_DIVISIBLE: Final = (12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840)
_EARLY: Final = tuple(number + more for number in _DIVISIBLE for more in (0, 1))
_MORE_OFTEN: Final = 10  # times as often, where costs vary


def next_verified(number: int, every: int, *, varies: bool) -> float:
    """Return the first step, from ``number`` on, that is counted whatever is known of it.

    every: ``verify_every`` of the meter; infinity is returned for 0. varies: a cost was found to
    vary, so that the counted steps are a sample. Only steps at random are then counted: regular
    ones would coincide with work that is done every so many steps.
    """
    if not every:
        return math.inf
    if varies:
        return _next_drawn(number, max(1, every // _MORE_OFTEN))
    early = [one for one in _EARLY if number <= one < every]
    return min(*early, -(-number // every) * every, _next_drawn(number, every))


def _next_drawn(number: int, every: int) -> int:
    """Return the first step, from ``number`` on, that is the random one of its stretch."""
    stretch = (number - 1) // every
    drawn = stretch * every + 1 + _draw(stretch, every)
    if drawn < number:
        stretch += 1
        drawn = stretch * every + 1 + _draw(stretch, every)
    return drawn


@functools.lru_cache(maxsize=16)
def _draw(stretch: int, every: int) -> int:
    # The stretch is the seed: a resumed run and every rank draw alike, and the program's own
    # generator is left alone.
    return random.Random(stretch).randrange(every)

"""Which steps a meter verifies: a few early ones, then regular ones and some at random."""

from __future__ import annotations

import functools
import random
from typing import Final

# Many runs are short. Work that a program does every k-th step is found early where k divides one
# of these, as 2 to 8, 10, 12, 15, 20, 24, 30 and 40 do.
_EARLY: Final = (12, 120, 840)
_MORE_OFTEN: Final = 10  # times as often, where costs vary


def is_verified(number: int, every: int, *, varies: bool) -> bool:
    """Return True if the step of that number, from 1 on, is counted whatever is known of it.

    every: ``verify_every`` of the meter. varies: a cost was found to vary, so that the counted
    steps are a sample. Only steps at random are then counted: regular ones would coincide with
    work that is done every so many steps.
    """
    if not every:
        return False
    if varies:
        return _is_drawn(number, max(1, every // _MORE_OFTEN))
    is_early = number in _EARLY and number < every
    return number % every == 0 or is_early or _is_drawn(number, every)


def _is_drawn(number: int, every: int) -> bool:
    """Return True if this is the random one of its stretch of so many steps."""
    stretch, offset = divmod(number - 1, every)
    return offset == _draw(stretch, every)


@functools.lru_cache(maxsize=16)
def _draw(stretch: int, every: int) -> int:
    # The stretch is the seed: a resumed run and every rank draw alike, and the program's own
    # generator is left alone.
    return random.Random(stretch).randrange(every)

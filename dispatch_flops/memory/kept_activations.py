"""Bytes of activations that modules kept for a backward pass, by step."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

_OFTEN = 64  # steps after which those that kept most are looked for, and others dropped

_Bytes = defaultdict[tuple[int, str], int]  # by round and the module's fqn
_Alive = Iterable[tuple[int, str, int]]  # round, fqn and bytes of each


class KeptActivations:
    """Bytes of activations of each module in each step.

    A step lasts until its backward pass. It may have several calls of a model, all of whose
    activations that pass needs. Where the program lets go of a call's results before, as in an
    evaluation with gradients, those of later calls take their place: a new round of the step
    begins. An activation counts in each round from its own to the one in which it was let go of.

    alive: returns the activations that are not released, from this round on. Each counts in every
    round of its step from its own.
    now: number of the round in which what is allocated now belongs. Calls that keep nothing for
    a backward pass are steps of one round each, apart from others, with negative numbers.
    """

    def __init__(self, alive: Callable[[int], _Alive]) -> None:
        self._alive = alive
        self.now = self._first = self._last = 0  # rounds of this step
        self._rounds = [0]  # of this step, without those that are dropped
        self._apart = 0
        self._kept: _Bytes = defaultdict(int)
        self._let_go: _Bytes = defaultdict(int)
        self._is_round_over = False
        self._several: list[tuple[int, int]] = []  # first and last of earlier steps of several

    def begin_step_apart(self) -> None:
        """Note that an outermost module call begins that keeps nothing for a backward pass."""
        self._apart += 1
        self.now = -self._apart
        self._drop_lower_steps(self._apart, are_apart=True)

    def begin_call(self) -> None:
        """Note that an outermost module call begins that keeps something."""
        if self._is_round_over:
            self._begin_round()

    def end_of_calls(self) -> None:
        """Note that an outermost module call ended."""
        self.now = self._last

    def next_step(self) -> None:
        """Note that a backward pass or an optimizer step is followed by another forward."""
        if self._first != self._last:
            self._several.append((self._first, self._last))
        self._first = self._last + 1
        self._rounds = []
        self._begin_round()

    def _begin_round(self) -> None:
        self._last += 1
        self._rounds.append(self._last)
        self._is_round_over = False
        if self.now >= 0:
            self.now = self._last
        self._drop_lower_steps(self._last, are_apart=False)

    def is_of_earlier_step(self, number: int) -> bool:
        """Return True for the round of a step whose backward pass is over."""
        return 0 <= number < self._first

    def add(self, number: int, fqn: str, size: int, *, is_forward: bool) -> None:
        """Add an activation of a round, which is released now; is_forward: no backward pass ran."""
        if not (is_forward and number >= self._first):
            self._kept[number, fqn] += size
            return
        self._is_round_over = True
        for later in reversed(self._rounds):  # it was there until now
            if later < number:
                break
            self._let_go[later, fqn] += size

    def by_step(self, alive: _Alive) -> dict[tuple[int, str], int]:
        """Return ``{(round, fqn): bytes}``, of those that kept most; alive: as at that time."""
        found, let_go = self._kept.copy(), self._let_go.copy()
        for number, fqn, size in alive:
            found[number, fqn] += size
        rounds: dict[int, dict[str, int]] = {number: {} for number, _ in let_go}
        for (number, fqn), size in found.items():
            rounds.setdefault(number, {})[fqn] = size
        for first, last in (*self._several, (self._first, self._last)):
            so_far: Counter[str] = Counter()
            for number in sorted(n for n in rounds if first <= n <= last):
                so_far.update(rounds[number])
                found.update({(number, fqn): size for fqn, size in so_far.items()})
        for key, size in let_go.items():
            found[key] += size
        return found

    def _drop_lower_steps(self, count: int, *, are_apart: bool) -> None:
        """Forget, now and then, steps that are over and in which no module kept most."""
        if count % _OFTEN:
            return
        alive = () if are_apart else self._alive(self._first)
        # Results of the last ones may be held until those of the next replace them.
        kept = {*_highest(self.by_step(alive)), self._last - 1, self._last, 1 - self._apart}
        if are_apart:
            for key in self._kept.copy():
                if key[0] < 0 and key[0] not in kept:
                    del self._kept[key]
            return
        several = [span for span in self._several if any(span[0] <= n <= span[1] for n in kept)]
        self._several = several
        self._rounds = [number for number in self._rounds if number in kept]
        for key in self._let_go.copy():
            if key[0] not in kept:
                del self._let_go[key]
        for key in self._kept.copy():
            number = key[0]
            is_of_several = any(first <= number <= last for first, last in several)
            if number >= 0 and number not in kept and not is_of_several:
                del self._kept[key]


def _highest(by_step: Mapping[tuple[int, str], int]) -> Iterator[int]:
    """Yield, for each module, the step in which it and the modules below kept most."""
    sums: defaultdict[str, defaultdict[int, int]] = defaultdict(lambda: defaultdict(int))
    for (step, fqn), count in by_step.items():
        while fqn:
            sums[fqn][step] += count
            fqn = fqn.rpartition(".")[0]
        sums[""][step] += count
    for found in sums.values():
        yield max(found, key=found.__getitem__)

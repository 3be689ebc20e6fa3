"""Checks of a profile that was built by hand or loaded."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterable, Iterator

from dispatch_flops.profile.communication import COMM_KINDS, CommTotal
from dispatch_flops.profile.cost import ALL_PHASES, ZERO, counts_of
from dispatch_flops.profile.memory import MemoryProfile, ModuleMemory, counts_held
from dispatch_flops.profile.run_info import RunInfo
from dispatch_flops.profile.tree import ModuleNode, OpTotal, sum_of_parts

_COUNTS = ("calls", "own_params", "total_params", "active_params", "trainable_params")
_counts_of = operator.attrgetter(*_COUNTS)
_INTS = {int}
_SIZES = ("world_size", "data_parallel_size", "model_parallel_size")


def params_outside(*roots: ModuleNode) -> dict[int, int]:
    """Return ``{id(node): own parameters of all nodes that are not at or below it}``."""
    within: dict[int, int] = {}
    for root in roots:
        for node in reversed(list(root.walk())):
            below = (within[id(child)] for child in node.children)
            within[id(node)] = sum(below, start=_count_or_0(node.own_params))
    everywhere = sum(within[id(root)] for root in roots)
    return {node: everywhere - params for node, params in within.items()}


def flaws(node: ModuleNode, params_elsewhere: int, checked: set[int]) -> Iterator[str]:
    """Yield what is wrong with the node itself and against its children.

    params_elsewhere: own parameters of all nodes that are not at or below it. checked: ids of the
    operators that were checked in other nodes, for modules that are alike share theirs.
    """
    if "_totals" in node.__dict__:  # else not computed yet; they will be the sums
        yield from _wrong_totals(node)
    counts = _counts_of(node)
    if not _are_counts(counts):
        for name, count in zip(_COUNTS, counts, strict=True):
            if not _is_count(count):
                yield f"{name} = {count!r} is not a count"
    if node.tokens is not None and not _is_count(node.tokens):
        yield f"tokens = {node.tokens!r} is not a count"
    own, total = node.own_params, node.total_params
    below = [child.total_params for child in node.children]
    # Parameters beyond its own and its children's are those of a shared module, which the tree
    # has under another parent.
    if not max(own, *below, 0) <= total <= own + sum(below) + params_elsewhere:
        yield f"total_params = {total} are not its own {own} and {below}"
    if node.active_params > total or node.trainable_params > total:
        yield "more active or trainable parameters than parameters"
    local = node.local_params
    if local is not None and not (_is_count(local) and local <= total):
        yield f"local_params = {local!r} are not a part of {total}"
    if node.seconds or node.latency_spread_s is not None:
        yield from flaws_of_seconds((*node.seconds.values(), node.latency_spread_s))
    if node.memory is not None:
        yield from _flaws_of_held(node.memory)
    for op in node.ops:
        if id(op) not in checked:
            checked.add(id(op))
            yield from _flaws_of_op(op)


def flaws_of_seconds(readings: Iterable[float | None]) -> Iterator[str]:
    """Yield those of the times that no clock can have measured."""
    for seconds in readings:
        if seconds is not None and not 0 <= seconds < math.inf:
            yield f"a latency of {seconds} s"


def flaws_of_run(run: RunInfo) -> Iterator[str]:
    """Yield what is wrong with the numbers of ranks."""
    if not _is_count(run.rank):
        yield f"rank {run.rank!r} is not a count"
    sizes = {name: getattr(run, name) for name in _SIZES if getattr(run, name) is not None}
    sizes |= {f"the size of {dim.name}": dim.size for dim in run.mesh or ()}
    for name, size in sizes.items():
        if not _is_count(size) or not size:
            yield f"{name} is {size!r}, and not at least 1"


def flaws_of_memory(memory: MemoryProfile | None) -> Iterator[str]:
    """Yield what is wrong with the memory of a run."""
    for device in memory.devices if memory is not None else ():
        phases: list[object] = [peak.peak_at.phase for peak in device.peaks]
        phases += (point.at.phase for point in device.timeline)
        uses = (use for peak in device.peaks for use in peak.uses)
        phases += (use.phase for use in uses if use.phase is not None)
        for phase in phases:
            if not _is_phase(phase):
                yield f"memory of {device.device}: {phase!r:.60} is not a phase"
        for peak in device.peaks:
            together = sum(use.bytes for use in peak.uses)
            if not all(_is_count(use.bytes) for use in peak.uses) or together != peak.peak_bytes:
                yield (
                    f"memory of {device.device}: what is used at {peak.peak_at} adds up to "
                    f"{together} bytes, not to the peak of {peak.peak_bytes!r}"
                )
        for point in device.timeline:
            if not all(map(_is_count, point.bytes_by_role.values())):
                yield f"memory of {device.device}: {point} has bytes that are not a count"


def _flaws_of_held(memory: ModuleMemory) -> Iterator[str]:
    counts = (*counts_held(memory.own), *counts_held(memory.total), *memory.peak_bytes.values())
    if not all(map(_is_count, counts)):
        yield f"{memory} has a number of bytes that is not a count"
    elif any(map(operator.gt, counts_held(memory.own), counts_held(memory.total))):
        yield f"{memory} holds more bytes by itself than in total"


def _wrong_totals(node: ModuleNode) -> Iterator[str]:
    totals, parts = node._totals, sum_of_parts(node)
    if totals != parts:
        for phase in {**totals, **parts}:
            total, expected = totals.get(phase, ZERO), parts.get(phase, ZERO)
            if total != expected:
                yield f"{phase}: total {total} is not {expected}, the sum of its parts"


def _flaws_of_op(op: OpTotal) -> Iterator[str]:
    counts = (op.calls, op.uncounted, *counts_of(op.cost or ZERO))
    if not _are_counts(counts) or op.uncounted > op.calls:
        yield f"{op} has a count that is not a count"
    if not _is_phase(op.phase):
        yield f"{op} has no phase"
    yield from flaws_of_seconds((op.latency_s,))
    if op.phase == ALL_PHASES:
        yield f"{op} has the phase {op.phase!r}, which stands for all phases together"
    if (op.cost is None) != (op.uncounted == op.calls > 0):
        yield f"{op} has a cost but no counted call, or counted calls but no cost"


def communication_flaws(total: CommTotal, fqns: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the total; ``fqns`` are those of the profile's modules."""
    if total.fqn not in fqns:
        yield f"{total.op} is recorded under a module that the profile does not have"
    if not _is_phase(total.phase):
        yield f"{total} has no phase"
    if total.kind not in COMM_KINDS:
        yield f"{total.kind!r} is not a kind of communication"
    if not all(map(_is_count, (total.calls, total.payload_bytes))):
        yield f"{total} has a count that is not a count"
    group = total.group
    if not _is_count(group.size) or len(set(group.ranks)) != len(group.ranks) or group.size < 1:
        yield f"the group {group.name!r} has repeated ranks or a size that is not a count"
    if len(group.ranks) != group.size or not all(map(_is_count, group.ranks)):
        yield f"the group {group.name!r} of size {group.size} has the ranks {group.ranks!r:.60}"
    for shares in (total.sent_bytes, total.received_bytes):
        if shares is not None and not (len(shares) == group.size and all(map(_is_count, shares))):
            yield f"{shares!r:.60} are not bytes for each of {group.size} ranks"


def _is_phase(name: object) -> bool:
    return type(name) is str and bool(name)


def _count_or_0(number: object) -> int:
    return number if isinstance(number, int) else 0


def _are_counts(numbers: tuple[int, ...]) -> bool:
    """Return True if each is a count: ``_is_count`` takes longer, and profiles have many."""
    return {*map(type, numbers)} == _INTS and min(numbers) >= 0


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0

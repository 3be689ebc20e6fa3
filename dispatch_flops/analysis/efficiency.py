"""MFU, HFU and the roofline: how close a run comes to the peaks of its machine.

Each dtype has its own peak. The least time that the peaks allow is the sum of ``flops / peak``
over dtypes, and a utilisation is that time divided by the time taken. In one dtype this is the
usual ``flops / (seconds * peak)``. float32 work is compared with the peak of float32. For work
that ran in TF32, as convolutions do by default, pass ``machine.with_tf32()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dispatch_flops.analysis.kernel_families import family_of
from dispatch_flops.analysis.latency import whole_latencies
from dispatch_flops.analysis.machines import Machine, check_machine, find, is_finite
from dispatch_flops.analysis.mfu_definitions import GivenSizes, MfuDefinition, ops_of_definition
from dispatch_flops.analysis.operators import phases_of
from dispatch_flops.errors import ConfigError
from dispatch_flops.profile import ModuleNode, OpTotal, Profile, add_costs, merge_ops
from dispatch_flops.profile.cost import MODEL_PHASES, OpCost, Phase
from dispatch_flops.units import ratio

Bound = Literal["compute", "memory"]

# No vendor states a peak for them. int8 has matrix units of its own.
_PLAIN_INTEGERS = frozenset({"bool", "int16", "int32", "int64", "uint16", "uint32", "uint64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a machine allows for some work; None where a peak or the bandwidth is not known.

    attainable_s: least seconds. Each operator takes the longer of computing and moving bytes.
    attainable_flops_per_s: FLOPs divided by that time.
    bound: what takes the larger part of that time, "compute" or "memory".
    exceeds_peak: the measured time is shorter than the peaks of computing allow, so a count, the
        time or a peak is wrong; or shorter than the bandwidth allows, unless caches or fused
        kernels saved traffic.

    Example::

        limit = roofline(profile.op_totals(), MACHINES["NVIDIA H200"])
        print(f"{limit.attainable_s * 1e6:.2f} us at best, bound by {limit.bound}")
    """

    cost: OpCost
    attainable_s: float | None = None
    attainable_flops_per_s: float | None = None
    bound: Bound | None = None
    exceeds_peak: bool = False

    @property
    def arithmetic_intensity(self) -> float | None:
        """FLOPs per byte; None where no byte is moved."""
        return self.cost.arithmetic_intensity


def mfu(
    profile: Profile,
    machine: Machine | None,
    seconds: float | None,
    *,
    definition: MfuDefinition = "all",
    params: int | None = None,
    embedding_params: int | None = None,
    layers: int | None = None,
    width: int | None = None,
    tokens: int | None = None,
    sequence: int | None = None,
) -> float | None:
    """Return the model FLOPs utilisation, of forward and backward of everything that ran.

    seconds: of the run. Arguments and result are as for ``utilisation``.
    machine: one device, as a profile is of one rank. Of a step that was counted whole and runs on
        8 devices, divide the result by 8.
    definition: what is divided by the peak. "all" (the default) is every counted FLOP, and
        "contractions" 2 for each multiply-accumulate. The others are closed forms of training:
        "6N" is 6 x params x tokens; "6N+12LdT" adds 12 x layers x width x sequence for each token,
        attention without a mask; "6N+6LdT" half of that, causal attention. Each has a name that
        ends in " without embedding": N is then without the parameters of look-up tables. The
        profile's own ``causal`` applies to "all" and "contractions". Their FLOPs are each divided
        by the peak of the dtype that they are computed in: what autocast leaves in float32, by
        that of float32. A closed form has the dtype of most multiply-accumulates.
    params, embedding_params, layers, width, tokens, sequence: what a closed form needs. width is
        heads x head size; tokens are those of a step for each device. None (the default) reads
        the size from the profile. A step of several micro-batches does not show tokens and
        sequence, for the profile has the inputs of the first alone.

    Raises ConfigError for an unknown definition, for a size that is neither given nor shown by the
    profile, and for seconds that are not a number of 0 or more.

    Example::

        mfu(profile, MACHINES["NVIDIA H200"], profile.timing.iteration_s)  # such as 0.41
        sizes = {"layers": 32, "width": 4096, "sequence": 8192, "tokens": 8192}
        mfu(profile, MACHINES["NVIDIA H200"], 0.5, definition="6N+12LdT", **sizes)
    """
    given = GivenSizes(
        params=params,
        embedding_params=embedding_params,
        layers=layers,
        width=width,
        tokens=tokens,
        sequence=sequence,
    )
    ops = ops_of_definition(profile, definition, given)
    return utilisation(ops, MODEL_PHASES, machine, seconds)


def hfu(profile: Profile, machine: Machine | None, seconds: float | None) -> float | None:
    """Return the hardware FLOPs utilisation: as ``mfu``, but of all phases.

    seconds: of the run.

    Example::

        h200 = MACHINES["NVIDIA H200"]
        # The difference is recomputation and the optimizer.
        print(hfu(profile, h200, 0.02) - mfu(profile, h200, 0.02))
    """
    return utilisation(profile.op_totals(), phases_of(profile), machine, seconds)


def mfu_is_lower_bound(profile: Profile, machine: Machine | None) -> bool:
    """Return whether ``mfu`` leaves out some of the work of forward and backward.

    Example::

        h200 = MACHINES["NVIDIA H200"]
        sign = ">=" if mfu_is_lower_bound(profile, h200) else "="
        print(f"MFU {sign} {mfu(profile, h200, 0.02):.1%}")
    """
    return utilisation_is_lower_bound(profile.op_totals(), MODEL_PHASES, machine)


def hfu_is_lower_bound(profile: Profile, machine: Machine | None) -> bool:
    """Return whether ``hfu`` leaves out some of the work.

    Example::

        if hfu_is_lower_bound(profile, MACHINES["NVIDIA H200"]):
            print("left out:", list(profile.uncounted_ops()) or "work in integers")
    """
    return utilisation_is_lower_bound(profile.op_totals(), phases_of(profile), machine)


def utilisation(
    ops: Iterable[OpTotal],
    phases: Iterable[Phase],
    machine: Machine | None,
    seconds: float | None,
) -> float | None:
    """Return the least seconds at the dense peaks, divided by the seconds taken.

    phases: of the operators that count; the others are skipped.
    seconds: that these phases took.

    None if the machine, a peak or the time is not known, or the time is 0. A value above 1 means
    that a count, the time or the peak is wrong, and is returned unchanged. Raises ConfigError for
    seconds that are not a number of 0 or more, and for a text as ``phases``.

    Example::

        attention = [op for op in profile.op_totals() if "attention" in op.op]
        print(utilisation(attention, ["forward"], MACHINES["NVIDIA H200"], seconds=0.004))
    """
    check_machine(machine)
    _check_seconds(seconds)
    if machine is None:
        return None
    wanted = _phase_set(phases)
    least = compute_s((op for op in ops if op.phase in wanted), machine)
    return ratio(least, seconds)


def _phase_set(phases: Iterable[Phase]) -> frozenset[Phase]:
    """Return the phases; raise ConfigError for a text, whose letters are none."""
    if isinstance(phases, str):
        raise ConfigError(f'phases={phases!r:.60}: pass a list of phases, such as ["forward"]')
    return frozenset(phases)


def _check_seconds(seconds: object) -> None:
    """Raise ConfigError if ``seconds`` is neither a number of 0 or more nor None."""
    if seconds is not None and not (is_finite(seconds) and seconds >= 0):
        raise ConfigError(f"seconds={seconds!r:.60}: pass the seconds that the run took, or None")


def why_no_utilisation(
    ops: Iterable[OpTotal],
    phases: Iterable[Phase],
    machine: Machine | None,
    seconds: float | None,
) -> str:
    """Return why ``utilisation`` of the same arguments is None; ``""`` if it is not None.

    ops, phases, machine, seconds: those that ``utilisation`` was given.

    Example::

        board = Machine(name="my board", flops_per_s={"float16": 125e12})
        reason = why_no_utilisation(profile.op_totals(), ["forward"], board, 0.1)
        print(reason)  # prints no peak of my board is known for float32
    """
    wanted = _phase_set(phases)
    ran = [op for op in ops if op.phase in wanted]
    if machine is None:
        return "the device's peaks are not known; pass machine="
    if utilisation(ran, wanted, machine, seconds) is not None:
        return ""
    if not seconds:
        return "the time was not measured"
    return why_no_peak(ran, machine) or "the FLOPs exceed the range of a float"


def why_no_peak(ops: Iterable[OpTotal], machine: Machine) -> str:
    """Return which dtypes of ``ops`` the machine states no peak for; ``""`` if it states all."""
    without = {
        op.dtype or "operators without a dtype"
        for op in ops
        if _has_flops(op) and not _peak(machine, op) and op.dtype not in _PLAIN_INTEGERS
    }
    return f"no peak of {machine.name} is known for {', '.join(sorted(without))}" if without else ""


def utilisation_is_lower_bound(
    ops: Iterable[OpTotal], phases: Iterable[Phase], machine: Machine | None
) -> bool:
    """Return whether ``utilisation`` of the same arguments leaves out some of the work.

    That is work of operators without a known cost, and work in integers without a peak.
    """
    check_machine(machine)
    wanted = _phase_set(phases)
    return any(
        op.uncounted or (_has_flops(op) and op.dtype in _PLAIN_INTEGERS and not _peak(machine, op))
        for op in ops
        if op.phase in wanted
    )


def _peak(machine: Machine | None, op: OpTotal) -> float | None:
    return None if machine is None else machine.peak(op.dtype, family_of(op.op))


def _has_flops(op: OpTotal) -> bool:
    return op.cost is not None and op.cost.flops > 0


def compute_s(ops: Iterable[OpTotal], machine: Machine) -> float | None:
    """Return the seconds that ``ops`` take at the dense peaks; None if a peak is not known.

    Machines state no peak for wide integers, such as int64. Their work is left out, so the
    result is a lower bound where there is any.
    It is None, too, where FLOPs exceed the range of a float.

    Example::

        h200 = MACHINES["NVIDIA H200"]
        in_tf32 = compute_s(profile.op_totals(), h200.with_tf32())
        print(in_tf32 / compute_s(profile.op_totals(), h200))  # the vector units are slower
    """
    check_machine(machine)
    total = 0.0
    for op in ops:
        if op.cost is None or not op.cost.flops:
            continue
        peak = _peak(machine, op)
        if peak is None and op.dtype in _PLAIN_INTEGERS:
            continue
        seconds = ratio(op.cost.flops, peak)
        if seconds is None:
            return None
        total += seconds
    return total


def moving_s(cost: OpCost, machine: Machine) -> float | None:
    """Return the seconds that the bytes take at the bandwidth; None if that is not known."""
    return ratio(cost.bytes_total, machine.bytes_per_s)


def roofline(
    ops: Iterable[OpTotal], machine: Machine | None, seconds: float | None = None
) -> Roofline:
    """Return the roofline of some operators.

    seconds: the time they took, which decides ``exceeds_peak``; None, or 0, if it was not measured.
        Raises ConfigError if it is not a number of 0 or more.

    Example::

        products = [op for op in profile.op_totals() if op.cost is not None and op.cost.macs]
        print(roofline(products, MACHINES["NVIDIA H200"], seconds=1e-3).arithmetic_intensity)
    """
    check_machine(machine)
    _check_seconds(seconds)
    known = list(_kernels(op for op in ops if op.cost is not None))
    cost = add_costs(op.cost for op in known)
    computing = compute_s(known, machine) if machine is not None else None
    if machine is None or machine.bytes_per_s is None or computing is None:
        least = [computing, None if machine is None else moving_s(cost, machine)]
        return Roofline(cost=cost, exceeds_peak=any(_exceeds(s, seconds) for s in least))
    in_compute = in_memory = 0.0
    for op in known:
        compute = compute_s([op], machine) or 0.0
        move = ratio(op.cost.bytes_total if op.cost else 0, machine.bytes_per_s)
        if move is None:
            return Roofline(cost=cost, exceeds_peak=_exceeds(computing, seconds))
        if compute >= move:
            in_compute += compute
        else:
            in_memory += move
    attainable = in_compute + in_memory
    return Roofline(
        cost=cost,
        attainable_s=attainable,
        attainable_flops_per_s=ratio(cost.flops, attainable),
        bound=None if not attainable else "compute" if in_compute >= in_memory else "memory",
        exceeds_peak=_exceeds(max(computing, cost.bytes_total / machine.bytes_per_s), seconds),
    )


def _kernels(ops: Iterable[OpTotal]) -> Iterator[OpTotal]:
    """Yield the operators, those with shares in other phases or modules as one.

    A share has no calls, and often no bytes: one kernel does the work while it moves the bytes.
    """
    ops = list(ops)
    shared = {(op.op, op.dtype) for op in ops if not op.calls}
    together: dict[tuple[str, str | None], OpTotal] = {}
    for op in ops:
        key = (op.op, op.dtype)
        if key in shared:
            together[key] = merge_ops(together[key], op) if key in together else op
        else:
            yield op
    yield from together.values()


def node_roofline(
    node: ModuleNode, machine: Machine | None, phase: Phase | None = "forward"
) -> Roofline:
    """Return the roofline of a module and all below it, in one phase or in all.

    Example::

        for node in profile.root.children:
            print(node.fqn, node_roofline(node, MACHINES["NVIDIA H200"], "backward").bound)
    """
    node.total(phase)  # raises for what is not a phase
    ops = (op for below in node.walk() for op in below.ops if phase in (None, op.phase))
    seconds = whole_latencies(node)[node.fqn] if phase is None else node.seconds.get(phase)
    return roofline(ops, machine, seconds)


def _exceeds(least_s: float | None, seconds: float | None) -> bool:
    return least_s is not None and seconds is not None and 0 < seconds < least_s


def machine_of(profile: Profile, machine: Machine | None = None) -> Machine | None:
    """Return ``machine`` if given, else the one that the profile ran on; None if not known.

    Example::

        machine = machine_of(profile) or measure_machine("cpu", [torch.float32], size=64)
        print(machine.name, machine.source)
    """
    check_machine(machine)
    return find(profile.run.device_name) if machine is None else machine

"""Cost of one operator call: the formula's MACs and FLOPs, the bytes moved, the compute dtype."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

from dispatch_flops import _torch
from dispatch_flops._torch import OpOverload
from dispatch_flops.errors import FormulaError
from dispatch_flops.operators.access import access_of, named_arguments, split_outs
from dispatch_flops.operators.conventions import Conventions, using
from dispatch_flops.operators.interrupts import is_of_signal_handler
from dispatch_flops.operators.memory import nbytes
from dispatch_flops.operators.registry import Rule
from dispatch_flops.operators.tensors import (
    is_inexact_dtype,
    is_int,
    name_of_dtype,
    promoted_dtype,
    tensors_in,
)
from dispatch_flops.profile.cost import (
    ALL_PHASES,
    COST_FIELDS,
    FLOPS_PER_MAC,
    OpCost,
    Phase,
    Share,
    Split,
    counts_of,
)

# The reason why a cost is not known while a program is traced with symbols for its sizes.
SYMBOLIC: Final = "its sizes are symbols"


class _SymbolicSizesError(FormulaError):
    """The count that a formula returned holds symbols.

    To ask for its value would bind the program that is traced to the sizes of the example.
    """


@dataclass(slots=True, eq=False)
class CallCost:
    """Cost of one call of an operator, shared by all its calls of the same signature.

    op: the overload's name, ``"aten.addmm.default"``.
    kind: the rule's kind, or "unknown" where there is no rule or its formula failed.
    dtype: what the kernel computes in (see ``compute_dtype``).
    cost: what belongs to the calling module in the observed phase; None if unknown.
    shares: what belongs to submodules or to other phases.
    error: why the cost is not known: the exception that the formula raised, as text, or a reason.
    """

    op: str
    kind: str
    dtype: str | None = None
    cost: OpCost | None = None
    shares: tuple[Share, ...] = ()
    error: str | None = None

    def parts(self, phase: Phase) -> Iterator[tuple[str, Phase, OpCost]]:
        """Yield ``(child, phase, cost)`` for each part of the cost of a call made in ``phase``.

        ``child`` is the relative name of a submodule, ``""`` for the calling module itself.
        Yields nothing if the cost is unknown.
        """
        if self.cost is not None:
            yield "", phase, self.cost
            for share in self.shares:
                yield share.child, share.phase or phase, share.cost


def cost_of_call(
    name: str,
    func: Any,
    rule: Rule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
    conventions: Conventions,
    *,
    read: Any = None,
) -> CallCost:
    """Return the cost of a call of ``func`` that returned ``out``.

    name: the operator's name in the result.
    read: the tensors that the call reads; by default its arguments.

    If the formula raises, the cost is unknown and ``error`` holds the exception. Raises only what a
    signal's handler does.
    """
    with _torch.modes_disabled():  # the user's do not see operators that formulas run
        kwargs, outs = split_outs(func, kwargs)
        if out is None and outs:  # such an operator returns nothing
            out = outs[0] if len(outs) == 1 else outs
        promoting = rule.kind == "pointwise"
        dtype = compute_dtype(args, kwargs, out, promoting=promoting)
        if isinstance(func, type):
            dtype = _narrowest(dtype, out)
        try:
            dtype = _stated_dtype(func, rule, args, kwargs, out) or dtype
            with using(conventions):
                answer = rule.answer(func, args, kwargs, out)
            own, shares = _as_cost(answer, are_reals=_is_real(dtype))
            # An int is the FLOPs that a user's formula states without MACs: they count as stated.
            if conventions.flops == "contractions" and (rule.builtin or not is_int(answer)):
                own, shares = _contractions_only(own), tuple(map(_contractions_only_share, shares))
            if rule.moves and not (rule.states_bytes or own.bytes_read or own.bytes_written):
                ins, written = _bytes_moved(func, args, kwargs, out, read)
                own = dataclasses.replace(own, bytes_read=ins, bytes_written=written)
        except Exception as error:
            if is_of_signal_handler(error):
                raise
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, _SymbolicSizesError):
                reason = SYMBOLIC
            return CallCost(name, "unknown", dtype, error=reason)
    return CallCost(name, rule.kind, dtype, own, shares)


def _stated_dtype(
    func: Any, rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> str | None:
    stated = rule.computes_in
    if callable(stated):
        stated = stated({**_by_name(func, args, kwargs), "out": out})
    return None if stated is None else name_of_dtype(stated)


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """Return the arguments by name: of a module class those of its forward, with ``self``.

    Those of a Triton kernel have their names; of a higher-order operator some do.
    """
    if isinstance(func, OpOverload):
        return named_arguments(func, args, kwargs)
    if isinstance(func, type) and issubclass(func, torch.nn.Module):
        return inspect.signature(func.forward).bind_partial(*args, **kwargs).arguments
    return kwargs


def _bytes_moved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, read: Any
) -> tuple[int, int]:
    """Return the bytes that a call reads and writes.

    They are those of each distinct element of memory that an unfused operator must touch, once.
    """
    if _is_view(func):
        return 0, 0
    access = access_of(func, args, kwargs, out)
    if access is None:
        return nbytes((args, kwargs) if read is None else read), nbytes(out)
    named = named_arguments(func, args, kwargs)
    inputs = [value for name, value in named.items() if name not in access.unread]
    unwritten = nbytes(access.unneeded) + access.kept
    return nbytes(inputs) + access.picked, nbytes(out, access.written) - unwritten


def _as_cost(answer: Any, *, are_reals: bool) -> tuple[OpCost, tuple[Share, ...]]:
    """Return a formula's answer as its own cost and its shares.

    are_reals: the operator computes in floating-point or complex numbers.

    Raises FormulaError unless all counts are non-negative ints (of Python or of NumPy), and for
    MACs of reals without their FLOPs.
    """
    shares: tuple[Share, ...] = ()
    if isinstance(answer, Split):
        answer, shares = answer.own, answer.shares
    if is_int(answer):
        answer = OpCost(flops=int(answer))
    if isinstance(answer, torch.SymInt):
        raise _SymbolicSizesError
    if not isinstance(answer, OpCost):
        raise FormulaError(
            f"the formula returned {answer!r:.60}; return an OpCost, a Split, or an int of FLOPs"
        )
    own = _checked(answer, are_reals=are_reals)
    return own, tuple(_checked_share(share, are_reals=are_reals) for share in shares)


def _checked_share(share: Any, *, are_reals: bool) -> Share:
    if not isinstance(share, Share) or not isinstance(share.cost, OpCost):
        raise FormulaError(
            f"the formula returned {share!r:.60} as a share of the cost; return "
            "Share(cost=OpCost(...))"
        )
    if share.phase in ("", ALL_PHASES) or not isinstance(share.phase, str | None):
        raise FormulaError(
            f"the formula returned a Share of the phase {share.phase!r}, which no phase can be "
            f'called; name it "recompute" or the like, or omit it for that of the call'
        )
    return dataclasses.replace(share, cost=_checked(share.cost, are_reals=are_reals))


def _checked(cost: OpCost, *, are_reals: bool) -> OpCost:
    """Return the cost with ints of Python for counts."""
    counts = counts_of(cost)
    if any(isinstance(number, torch.SymInt) for number in counts):
        raise _SymbolicSizesError
    for number in counts:
        if not is_int(number) or number < 0:
            raise FormulaError(f"the formula returned {cost}; counts are ints of at least 0")
    least = FLOPS_PER_MAC * cost.macs
    if cost.flops < least and are_reals:
        raise FormulaError(
            f"the formula returned {cost.macs} MACs and {cost.flops} FLOPs; FLOPs include 2 for "
            f"each MAC, so return OpCost(macs={cost.macs}, flops={least + cost.flops}) if "
            f"{'there are no others' if not cost.flops else f'{cost.flops} are others'}"
        )
    return OpCost(**dict(zip(COST_FIELDS, map(int, counts), strict=True)))


def _contractions_only(cost: OpCost) -> OpCost:
    """Return the cost with no FLOPs but those of its MACs."""
    return dataclasses.replace(cost, flops=FLOPS_PER_MAC * cost.macs)


def _contractions_only_share(share: Share) -> Share:
    return dataclasses.replace(share, cost=_contractions_only(share.cost))


def _is_view(func: Any) -> bool:
    return isinstance(func, OpOverload) and func.is_view


def compute_dtype(
    args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, promoting: bool = False
) -> str | None:
    """Return the dtype that the kernel computes in, such as ``"bfloat16"``; None without tensors.

    It is the dtype of the first floating-point or complex tensor among operands and results, or
    else of the first tensor.

    promoting: use the dtype that torch promotes the operands to, and makes complex for a complex
        number, if that is floating-point or complex.
    """
    operands = list(tensors_in((args, kwargs)))
    if promoting and len(operands) > 1:
        with suppress(RuntimeError):  # torch promotes no quantized numbers, but it compares them
            promoted = promoted_dtype(operands)
            if is_inexact_dtype(promoted):
                return name_of_dtype(promoted)
    dtypes = [tensor.dtype for tensor in (*operands, *tensors_in(out))]
    found = next(filter(is_inexact_dtype, dtypes), dtypes[0] if dtypes else None)
    if found is None:
        return None
    if promoting and found.is_floating_point and any(isinstance(arg, complex) for arg in args):
        found = found.to_complex()
    return name_of_dtype(found)


def _narrowest(dtype: str | None, out: Any) -> str | None:
    """Return the floating-point dtype with the fewest bytes among ``dtype`` and those of ``out``.

    A module whose result is narrower than its input computes in that, as under autocast.
    """
    known = getattr(torch, dtype or "", None)
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        return dtype
    results = [tensor.dtype for tensor in tensors_in(out) if tensor.is_floating_point()]
    return name_of_dtype(min((known, *results), key=lambda found: found.itemsize))


def _is_real(dtype: str | None) -> bool:
    """Return True for a floating-point or complex dtype, and where it is not known."""
    found = getattr(torch, dtype or "", None)
    return not isinstance(found, torch.dtype) or is_inexact_dtype(found)

"""Registry of workspaces: bytes that an operator's kernel allocates for itself while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dispatch_flops._torch import OpOverload
from dispatch_flops.errors import DuplicateFormulaError, FormulaError, UnknownOperatorError
from dispatch_flops.operators.access import split_outs
from dispatch_flops.operators.formula_signatures import check_formula
from dispatch_flops.operators.misspelt_names import warn_of_misspelt
from dispatch_flops.operators.operator_keys import candidate_keys, check_not_empty, name_of, to_keys
from dispatch_flops.operators.tensors import is_int

Workspace = Callable[..., "int | None"]
Condition = Callable[[tuple[Any, ...]], bool]


def always(args: tuple[Any, ...]) -> bool:
    """Return True."""
    return True


def never(args: tuple[Any, ...]) -> bool:
    """Return False."""
    return False


@dataclass(frozen=True, slots=True, eq=False)
class WorkspaceRule:
    """How the workspace of an operator's calls is found.

    formula: returns the bytes, or None where they are not known.
    may_be_unknown: False for the arguments of a call that the formula answers in any case.
    is_steady: a call's workspace depends on shapes, strides, dtypes and numbers, never on data.
    reads_result: the formula is also given what the call returned, as ``out``.
    """

    formula: Workspace
    may_be_unknown: Condition = always
    is_steady: bool = False
    reads_result: bool = True

    def after_call(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, out: Any
    ) -> int | None:
        """Return the workspace of a call that returned ``out``.

        Raises FormulaError unless the formula returns a count or None, and what it raises.
        """
        inputs, _ = split_outs(func, kwargs or {})
        size = self.formula(*args, out=out, **inputs)
        if size is None:
            return None
        if not is_int(size) or size < 0:
            raise FormulaError(
                f"the function returned {size!r:.60}; return an int of bytes, or None"
            )
        return int(size)


_WORKSPACES: dict[Any, WorkspaceRule] = {}
_OF_CUDA: dict[Any, WorkspaceRule] = {}  # where runs on the meta device are to be as on CUDA


def register_workspace(targets: Any, *, override: bool = False) -> Callable[[Workspace], Workspace]:
    """Register the decorated function as the workspace of an operator, or of several.

    The function is called as ``workspace(*args, out=out, **kwargs)`` with the operator's own
    arguments and its result. It returns the most bytes that the kernel holds at once, besides its
    results, or None where they are not known. On the CPU and on CUDA, torch's allocator then
    reports them; elsewhere the peak is a lower bound. So they are if the function raises or returns
    anything else, which a note of the profile says. It may read shapes, dtypes and devices, never
    data.

    targets: ``torch.ops.lib.op`` (all overloads; an in-place ``op_`` is an operator of its own),
        one overload, the result of ``torch.library.custom_op``, the name ``"lib::op"``, or a list
        of these.
    override: replace an existing workspace instead of raising.

    Raises DuplicateFormulaError for an operator that has a workspace, UnknownOperatorError for
    a target that is not an operator and for an empty list, and FormulaError if no call of a target
    fits the function.

    Example::

        @register_workspace(torch.ops.mylib.fused_mlp)
        def fused_mlp(x, w1, w2, *, out, **_):
            return x.shape[0] * w1.shape[1] * x.element_size()  # what lies between the products
    """
    keys = to_keys(targets)
    check_not_empty(keys)
    for key in keys:
        if not isinstance(key, str):
            raise UnknownOperatorError(f"{key!r:.60} is not an operator; pass torch.ops.lib.op")
        if key in _WORKSPACES and not override:
            raise DuplicateFormulaError(
                f"{name_of(key)} has a workspace already; pass override=True to replace it"
            )

    def decorate(workspace: Workspace) -> Workspace:
        if not callable(workspace):
            raise FormulaError(f"{workspace!r:.60} is not a function; pass the function itself")
        check_formula(workspace, keys, by_name=False)
        warn_of_misspelt(keys, "workspace")
        _WORKSPACES.update(dict.fromkeys(keys, WorkspaceRule(workspace)))
        return workspace

    return decorate


def builtin_workspace(
    targets: Iterable[Any],
    may_be_unknown: Condition = never,
    *,
    is_steady: bool = False,
    of_cuda: bool = False,
) -> Callable[[Workspace], Workspace]:
    """Register the decorated function as a workspace of this package; see ``WorkspaceRule``.

    targets: names as the registry's keys, such as "lib::op".
    of_cuda: it is that of CUDA's kernel, for runs on the meta device that are to be as on CUDA.
    """
    table = _OF_CUDA if of_cuda else _WORKSPACES

    def decorate(workspace: Workspace) -> Workspace:
        depends_on_shapes = is_steady or may_be_unknown is never
        rule = WorkspaceRule(workspace, may_be_unknown, depends_on_shapes, reads_result=False)
        table.update(dict.fromkeys(targets, rule))
        return workspace

    return decorate


def workspace_of(func: Any, *, as_on_cuda: bool = False) -> WorkspaceRule | None:
    """Return the rule of an operator's workspace; None if its kernel needs none.

    The kernel of an in-place operator is another than the functional one's.
    as_on_cuda: what runs on the meta device is to be as on CUDA.
    """
    if not isinstance(func, OpOverload):
        return None
    overload, operator, *_functional = candidate_keys(func)
    found = _WORKSPACES.get(overload) or _WORKSPACES.get(operator)
    if as_on_cuda and (found is None or not found.reads_result):
        return _OF_CUDA.get(operator, found)
    return found

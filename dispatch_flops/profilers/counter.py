"""``FlopCounterMode``: the context manager that users enter."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dispatch_flops.errors import (
    AlreadyActiveError,
    ConfigError,
    NotProfiledError,
    TargetError,
    UncountedOpsError,
    UncountedWarning,
)
from dispatch_flops.operators import (
    formulas,  # noqa: F401  (fills the registry)
    registry,
)
from dispatch_flops.operators.conventions import Causal, Conventions, Subclass
from dispatch_flops.operators.registry import Formula
from dispatch_flops.profile import ModuleNode, Profile
from dispatch_flops.profilers.session import Session


class FlopCounterMode:
    """Counts what every operator inside the block costs, by module and phase.

        with FlopCounterMode(model) as fc:
            model(x).sum().backward()
        fc.get_total_flops(); fc.profile.by_module("backward")

    mods: the model, or several; without it the modules that are called first are taken.
    depth: levels of modules in the table; None for all.
    display: print the table at exit.
    custom_mapping: ``{operator: formula}`` for this counter alone; formulas written for
        ``torch.utils.flop_counter`` are accepted too.
    strict: raise UncountedOpsError at exit if an operator ran that has no known cost.
    causal: "full" counts the whole rectangle of attention, "half" what a causal kernel needs.
    subclass: of tensors made of others (DTensor, quantised weights), "executed" counts what runs
        on the inner ones, of a DTensor on this rank; "logical" counts the operator on the whole.
    meta_value: answers ``.item()`` and its like where tensors have no data (meta, fake); without
        it they raise, as torch has it.
    latency: take the time of modules and operators in the same pass, the profiler's own time
        taken off; on the meta device nothing is computed and there is none. A pass without
        counting is more exact: see ``get_model_profile``.

    The program runs unchanged, but that compiled callables run their eager code inside the
    block; their compiled code is intact afterwards. Counts are of this process and of the
    threads that entered the counter (``in_thread``).
    """

    def __init__(
        self,
        mods: nn.Module | Sequence[nn.Module] | None = None,
        depth: int | None = 2,
        display: bool = True,
        custom_mapping: Mapping[Any, Formula] | None = None,
        *,
        strict: bool = False,
        causal: Causal = "full",
        subclass: Subclass = "executed",
        meta_value: float | None = None,
        latency: bool = False,
    ) -> None:
        if causal not in ("full", "half"):
            raise ConfigError(f'causal={causal!r}: choose "full" or "half"')
        if subclass not in ("executed", "logical"):
            raise ConfigError(f'subclass={subclass!r}: choose "executed" or "logical"')
        self._roots = _as_modules(mods)
        self.depth = depth
        self.display = display
        self._strict = strict
        self._own_rules = registry.rules_from(custom_mapping or {})
        self._conventions = Conventions(causal=causal, subclass=subclass, meta_value=meta_value)
        self._latency = latency
        self._session: Session | None = None
        self._profile: Profile | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> FlopCounterMode:
        if not self._lock.acquire(blocking=False):
            raise AlreadyActiveError(
                "this counter is active already: leave its block first, or use a second "
                "FlopCounterMode (different counters nest)"
            )
        try:
            self._session = Session(
                self._roots, self._conventions, self._own_rules, is_timed=self._latency
            )
            self._session.open()
        except BaseException:
            self._session = None
            self._lock.release()
            raise
        self._profile = None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        session = self._running("leaving it")
        session.check_thread()
        try:
            session.close()
            self._profile = session.profile()
        finally:
            self._session = None
            self._lock.release()
        if kind is not None:
            with suppress(UncountedWarning):  # the program's own exception goes before
                self._warn_of_uncounted()
            return
        self._warn_of_uncounted()
        if self.display:
            print(self.get_table(self.depth))
        self._refuse_uncounted()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Count in this worker thread too: a dispatch mode sees only threads that enter it."""
        with self._running("in_thread()").in_thread():
            yield

    def note_running(self, module: nn.Module) -> None:
        """Say that ``module``'s forward runs already: the block was entered in its midst."""
        self._running("note_running()").note_running(module)

    def pause(self) -> None:
        """Let the program run uncounted, as outside the block, until ``resume`` is called.

        Worker threads that are inside ``in_thread()`` by then go on.
        """
        self._running("pause()").close()

    def resume(self) -> None:
        """Count on."""
        self._running("resume()").open()

    def _running(self, what: str) -> Session:
        if self._session is None:
            raise NotProfiledError(f"{what} works inside the counter's block only")
        return self._session

    # -- results --------------------------------------------------------------------------------

    @property
    def profile(self) -> Profile:
        """Everything counted: so far inside the block, frozen after it."""
        if self._session is not None:
            return self._session.profile()
        if self._profile is None:
            raise NotProfiledError("nothing is counted yet: run the model inside the block")
        return self._profile

    def get_total_flops(self) -> int:
        """FLOPs of everything that ran, in all phases."""
        return self.profile.total().flops

    def get_total_macs(self) -> int:
        """Multiply-accumulates of everything that ran, in all phases."""
        return self.profile.total().macs

    def get_flop_counts(self) -> dict[str, dict[Any, int]]:
        """``{module: {operator packet: FLOPs}}``, inclusive, as torch.utils.flop_counter has it.

        "Global" holds everything; modules are named by the model's class and their fqn.
        Operators that cost nothing are left out.
        """
        profile = self.profile
        counts: dict[str, dict[Any, int]] = {"Global": {}}
        for node in profile.nodes():
            _add_flops(counts["Global"], node)
        top = profile.root
        for node in top.walk():
            if top.class_name and (node.calls or node.ops):
                name = f"{top.class_name}.{node.fqn}" if node.fqn else top.class_name
                counts[name] = {}
                for below in node.walk():
                    _add_flops(counts[name], below)
        return counts

    def get_table(self, depth: int | None = None) -> str:
        """The table that ``display`` prints, down to ``depth`` levels (default: the counter's)."""
        from dispatch_flops.renderers import View, table

        levels = self.depth if depth is None else depth
        return table.render(self.profile, View(depth=None if levels is None else levels - 1))

    # -- what could not be counted ----------------------------------------------------------------

    def _warn_of_uncounted(self) -> None:
        profile = self.profile
        uncounted = profile.uncounted_ops()
        if uncounted:
            warnings.warn(_describe(profile, uncounted), UncountedWarning, stacklevel=3)

    def _refuse_uncounted(self) -> None:
        uncounted = self.profile.uncounted_ops()
        if self._strict and uncounted:
            raise UncountedOpsError(_describe(self.profile, uncounted))


def _as_modules(mods: Any) -> tuple[nn.Module, ...]:
    if mods is None:
        return ()
    one = isinstance(mods, (nn.Module, type)) or not isinstance(mods, Iterable)
    modules = (mods,) if one else tuple(mods)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TargetError(
                f"mods holds a {type(module).__name__}; pass an nn.Module, a list of them, or None"
            )
    return modules


def _add_flops(counts: dict[Any, int], node: ModuleNode) -> None:
    for op in node.ops:
        if op.cost is not None and op.cost.flops:
            key = _packet(op.op)
            counts[key] = counts.get(key, 0) + op.cost.flops


def _packet(name: str) -> Any:
    """``"aten.mm.default" -> torch.ops.aten.mm``; the name itself where there is no such op."""
    library, _, rest = name.partition(".")
    packet = rest.rsplit(".", 1)[0]
    return getattr(getattr(torch.ops, library, None), packet, name)


def _describe(profile: Profile, uncounted: Mapping[str, int]) -> str:
    errors = profile.formula_errors()
    listed = ", ".join(
        f"{op} ({calls} calls{'; ' + errors[op] if op in errors else ''})"
        for op, calls in uncounted.items()
    )
    return (
        f"no cost is known for {listed}: totals are lower bounds. "
        "Give each a formula with dispatch_flops.register_flops"
    )

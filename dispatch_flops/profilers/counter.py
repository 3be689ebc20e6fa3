"""``FlopCounterMode``: count everything that runs in a ``with`` block."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from dispatch_flops.errors import (
    AlreadyActiveError,
    ConfigError,
    DispatchFlopsError,
    NotProfiledError,
    TargetError,
    UncountedOpsError,
    UncountedWarning,
)
from dispatch_flops.operators import (
    formulas,  # noqa: F401  (fills the registry)
    registry,
)
from dispatch_flops.operators.conventions import (
    Causal,
    Conventions,
    Flops,
    Subclass,
    Target,
)
from dispatch_flops.operators.registry import Formula
from dispatch_flops.profile import OUTSIDE, ModuleNode, Profile
from dispatch_flops.profile.cost import OpCost
from dispatch_flops.profile.holders import ProfileHolder
from dispatch_flops.profile.memory import FollowMemory, MemoryOptions, check_rounding, has_timeline
from dispatch_flops.profile.tree import check_depth
from dispatch_flops.profilers.session import Session
from dispatch_flops.profilers.uncounted import describe_uncounted, warn_of_uncounted


class FlopCounterMode(ProfileHolder):
    """Context manager that counts every operator inside the block, by module and phase.

        model, x = torch.nn.Linear(3, 5), torch.ones(2, 3)
        with FlopCounterMode(model, display=False) as counter:
            model(x).sum().backward()
        counter.get_total_macs()  # 2 * 2*3*5: forward, and the weight's gradient
        counter.profile.by_module("backward")

    mods: the model, a list of several, or a dict that names them: ``{"G": G, "D": D}`` gives fqns
        such as ``G.conv1``, and ``<outside>.Adam.G`` for the optimizer of ``G``. None (the default)
        takes the modules that are called first.
    depth: levels of modules below the model in the printout (default 2); None for all.
    display: print the profile at exit (default True), as ``renderers.overview`` shows it.
    custom_mapping: ``{operator: formula}`` for this counter only. Formulas written for
        ``torch.utils.flop_counter`` are accepted, too.
    strict: raise UncountedOpsError at exit if an operator has no known cost. Without it (the
        default) there is only an UncountedWarning, as there is in both cases for a module that ran
        and showed no operator: its kernels may bypass the dispatcher.
    causal: ``"full"`` (the default) counts the whole rectangle of causal attention, ``"half"``
        only the part that a causal kernel needs.
    flops: ``"all"`` (the default) counts every floating-point operation, ``"contractions"`` only 2
        for each MAC, as ``torch.utils.flop_counter`` does; bytes stay. FLOPs that a formula of
        your own returns as an int count as they are.
    subclass: for tensors that consist of others, such as DTensor and quantised weights:
        ``"executed"`` (the default) counts the operators on the inner tensors, which for DTensor
        are this rank's; ``"logical"`` counts the operator on the whole tensor.
    target: the device by whose rules tensors without data (meta, or fake on the CPU) run scaled
        dot product attention, dropout and RMS norm: ``"cpu"`` (the default), or ``"cuda"`` for
        compute capability 8.0 and later. Optimizers run as they do for ``"cuda"`` with
        ``foreach=True``.
    meta_value: result of ``.item()`` and similar calls on tensors without data (meta, fake); None
        (the default) lets them raise, as torch does.
    latency: time modules and operators in the same pass, in seconds, without the profiler's own
        overhead (default False). On the meta device there are no latencies. ``profile_model``
        takes more exact ones, in a pass without counting.
    memory: follow what the operators allocate, for ``profile.memory`` (default False);
        ``"timeline"`` also records memory over the operators, as ``profile.memory.timeline``.
    memory_rounding: bytes that each block of memory, and each workspace as one, is rounded up to a
        multiple of (default 1); 512 for the caching allocator of CUDA.
    optimizers: those whose state was there before; an optimizer that steps inside the block is
        found by its step.
    mesh: the program's ``DeviceMesh``, which names the groups of ``profile.communication``; None
        (the default): the mesh of the model's DTensor parameters, if it has any.

    The program runs unchanged, except that compiled callables run their eager code inside the
    block; their compiled code stays intact. Only this process is counted: the thread that entered
    the block, and threads inside ``in_thread()``.

    Raises TargetError if ``mods`` holds anything but modules or a name that is empty, has a dot or
    is that of the same module as another one; ConfigError for an unknown
    convention, and UnknownOperatorError for a key of ``custom_mapping`` that is not an operator.
    Entering a counter twice raises AlreadyActiveError; leaving it in another thread raises
    WrongThreadError, and in an inference mode or backward pass that began inside, WrongPlaceError.
    """

    def __init__(
        self,
        mods: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module] | None = None,
        depth: int | None = 2,
        display: bool = True,
        custom_mapping: Mapping[Any, Formula] | None = None,
        *,
        strict: bool = False,
        causal: Causal = "full",
        flops: Flops = "all",
        subclass: Subclass = "executed",
        meta_value: float | None = None,
        target: Target = "cpu",
        latency: bool = False,
        mesh: Any = None,
        memory: FollowMemory = False,
        memory_rounding: int = 1,
        optimizers: Sequence[Any] = (),
    ) -> None:
        self._roots = _as_modules(mods)
        check_depth(depth)
        self.depth = depth
        self.display = display
        self._strict = strict
        self._own_rules = registry.own_rules(custom_mapping)
        self._conventions = Conventions(
            causal=causal, subclass=subclass, meta_value=meta_value, flops=flops, target=target
        )
        self._latency = latency
        check_rounding(memory_rounding)
        options = MemoryOptions(
            memory_rounding, _checked(optimizers), has_timeline(memory), on_cuda=target == "cuda"
        )
        self._memory = options if memory else None
        if mesh is not None and not hasattr(mesh, "mesh_dim_names"):
            raise ConfigError(f"mesh is of type {type(mesh).__name__}; pass a DeviceMesh or None")
        self._mesh = mesh
        self._profile: Profile | None = None
        self._set_inactive()

    def _set_inactive(self) -> None:
        self._active: dict[str, Session] = {}  # the session that runs now
        # An interrupt can arrive before the first line of ``__exit__``, or the block be left
        # without it. What is active then ends with the counter's last reference.
        weakref.finalize(self, _abandon, self._active).atexit = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: the settings, the models, and the profile so far."""
        state = {name: value for name, value in vars(self).items() if name != "_active"}
        return state | {"_profile": self.profile} if self._active else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a counter in that state; a copy is never active."""
        vars(self).update(state)
        self._set_inactive()

    def __enter__(self) -> FlopCounterMode:
        session = Session(
            self._roots,
            self._conventions,
            self._own_rules,
            is_timed=self._latency,
            mesh=self._mesh,
            memory=self._memory,
        )
        try:
            # Claiming is one step, so that neither a thread nor an interrupt comes between.
            if self._active.setdefault("session", session) is not session:
                raise AlreadyActiveError(
                    "this counter is active already; leave its block first, or use a second "
                    "FlopCounterMode (different counters nest)"
                )
            session.open()
            self._profile = None
        except BaseException:
            if self._active.get("session") is session:
                _abandon(self._active)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            session = self._active_session("leaving it")
            self.check_leaving()
            try:
                session.close()
                calls = session.calls()
                self._profile = session.finish(calls)
            finally:
                _abandon(self._active)
        except DispatchFlopsError:  # the block cannot be left here
            raise
        except BaseException:  # of a signal's handler, perhaps, before the inner try
            _abandon(self._active)
            raise
        kernels = session.uncounted_kernels
        warn = partial(warn_of_uncounted, calls, session.unseen_modules, session.missed, *kernels)
        if kind is not None:
            with suppress(UncountedWarning):  # as an error, it would hide the program's exception
                warn()
            return
        warn()
        if self.display:
            self._print()
        if self._strict and calls.uncounted_ops():
            raise UncountedOpsError(describe_uncounted(calls))

    def check_leaving(self) -> None:
        """Raise WrongThreadError or WrongPlaceError where the block cannot be left."""
        session = self._active_session("check_leaving()")
        session.check_thread()
        session.check_scope()

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Count in this thread, too, inside the ``with`` block.

        A dispatch mode sees only the threads that enter it. Raises NotProfiledError outside the
        counter's block, as ``pause`` and ``resume`` do.
        """
        with self._active_session("in_thread()").in_thread():
            yield

    def note_running(self, module: nn.Module) -> None:
        """State that the block was entered while ``module``'s forward was running."""
        if not isinstance(module, nn.Module):
            raise TargetError(f"module is of type {type(module).__name__}; pass an nn.Module")
        self._active_session("note_running()").note_running(module)

    def pause(self) -> None:
        """Run the program uncounted, as outside the block, until ``resume`` is called.

        Threads that are inside ``in_thread()`` already are still counted.
        """
        self._active_session("pause()").close()

    def resume(self) -> None:
        """Continue counting after ``pause``."""
        self._active_session("resume()").open()

    def _active_session(self, what: str) -> Session:
        if "session" not in self._active:
            raise NotProfiledError(f"{what} works only inside the counter's block; enter it first")
        return self._active["session"]

    # -- results --------------------------------------------------------------------------------

    @property
    def profile(self) -> Profile:
        """Everything counted: so far inside the block, final after it.

        Raises NotProfiledError before the block is entered.
        """
        if "session" in self._active:
            return self._active["session"].profile()
        if self._profile is None:
            raise NotProfiledError("nothing is counted yet; run the model inside the block")
        return self._profile

    def get_total_flops(self) -> int:
        """Return the FLOPs of everything that ran, in all phases."""
        return self._total().flops

    def get_total_macs(self) -> int:
        """Return the multiply-accumulates of everything that ran, in all phases."""
        return self._total().macs

    def _total(self) -> OpCost:
        session = self._active.get("session")
        return self.profile.total() if session is None else session.calls().total()

    @property
    def flop_counts(self) -> defaultdict[str, Counter[Any]]:
        """The counts of ``get_flop_counts``; 0 for a module or operator that is not in them."""
        if self._profile is None and not self._active:
            return defaultdict(Counter)
        counts = self.get_flop_counts()
        return defaultdict(Counter, {name: Counter(ops) for name, ops in counts.items()})

    def get_flop_counts(self) -> dict[str, dict[Any, int]]:
        """Return ``{module: {operator packet: FLOPs}}``, as torch.utils.flop_counter does.

        A module's FLOPs include those of the modules below it. "Global" holds everything; modules
        are named by the model's class and their fqn. Operators without FLOPs are omitted.
        """
        profile = self.profile
        counts: dict[str, dict[Any, int]] = {"Global": {}}
        for node in profile.nodes():
            _add_flops(counts["Global"], node)
        top = profile.root
        found: dict[Any, int]
        for node in top.walk():
            if top.class_name and (node.calls or node.ops):
                found = counts[_name_in_torch(node, top)] = {}
                for below in node.walk():
                    _add_flops(found, below)
        return counts

    def get_table(self, depth: int | None = None) -> str:
        """Return a table of the modules, with parameters, MACs and FLOPs.

        depth: levels, as torch.utils.flop_counter counts them: 1 shows the model alone. None (the
            default) takes the counter's own ``depth``.
        """
        from dispatch_flops.renderers import View, table

        check_depth(depth)
        levels = self.depth if depth is None else depth
        deepest = None if levels is None else max(levels - 1, 0)  # the model always has a row
        return table.render(self.profile, View(depth=deepest))

    def __repr__(self) -> str:
        names = self._roots if isinstance(self._roots, dict) else map(_class_name, self._roots)
        models = f" of {', '.join(names)}" if self._roots else ""
        if self._active:
            return f"<FlopCounterMode{models}: counting, {self._counts()}>"
        is_empty = self._profile is None
        return f"<FlopCounterMode{models}: {'not entered' if is_empty else self._counts()}>"

    def _counts(self) -> str:
        total = self._total()
        return f"{total.macs} MACs, {total.flops} FLOPs"

    def __str__(self) -> str:
        """Return the printout of the profile so far; ``repr`` before the block is entered."""
        if self._profile is None and not self._active:
            return repr(self)
        return self._text()

    def _repr_html_(self) -> str | None:
        """Return the HTML that a notebook shows; None before the block is entered."""
        if self._profile is None and not self._active:
            return None
        return self.profile._repr_html_()

    def _print(self) -> None:
        from dispatch_flops.renderers.terminal import printable, terminal_view

        print(printable(self._text(**terminal_view())))

    def _text(self, **shown: Any) -> str:
        from dispatch_flops.renderers import View, overview

        depth = sys.maxsize if self.depth is None else self.depth
        return overview.render(self.profile, View(depth=depth, **shown))


def _abandon(active: dict[str, Session]) -> None:
    """Make sure that nothing is left behind and that the counter can be entered again."""
    session = active.get("session")
    if session is not None:
        session.end()
        active.pop("session", None)


def _as_modules(mods: Any) -> tuple[nn.Module, ...] | dict[str, nn.Module]:
    if mods is None:
        return ()
    is_one = isinstance(mods, (nn.Module, type)) or not isinstance(mods, Iterable)
    is_named = not is_one and isinstance(mods, Mapping)
    modules = (mods,) if is_one else tuple(mods.values() if is_named else mods)
    for module in modules:
        if isinstance(module, type) and issubclass(module, nn.Module):
            raise TargetError(f"mods holds the class {module.__name__}; pass an instance of it")
        if not isinstance(module, nn.Module):
            raise TargetError(
                f"mods holds an object of type {type(module).__name__}; pass an nn.Module, a list "
                "or a dict of them, or None"
            )
    return _with_checked_names(mods) if is_named else modules


def _checked(optimizers: Any) -> tuple[Any, ...]:
    if not isinstance(optimizers, Iterable) or isinstance(optimizers, str):
        raise ConfigError(
            f"optimizers is of type {type(optimizers).__name__}; pass a list of them, as [opt]"
        )
    given = tuple(optimizers)
    for optimizer in given:
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(
                f"optimizers holds an object of type {type(optimizer).__name__}; pass a list of "
                "torch.optim.Optimizer, as [opt]"
            )
    return given


def _with_checked_names(mods: Mapping[Any, nn.Module]) -> dict[str, nn.Module]:
    """Return the named models; raise TargetError for names that cannot begin an fqn."""
    names: dict[int, str] = {}
    for name, module in mods.items():
        if not isinstance(name, str) or not name or "." in name or name == OUTSIDE:
            raise TargetError(
                f"mods has the name {name!r}; name each model by a text without dots, such as 'G'"
            )
        if names.setdefault(id(module), name) != name:
            raise TargetError(
                f"mods names one module twice, {names[id(module)]!r} and {name!r}; name it once"
            )
    return dict(mods)


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _name_in_torch(node: ModuleNode, top: ModuleNode) -> str:
    """Return ``"Model.layer"``. A root that stands for several models has no name."""
    if not node.fqn:
        return top.class_name
    return node.fqn if top.is_several_models else f"{top.class_name}.{node.fqn}"


def _add_flops(counts: dict[Any, int], node: ModuleNode) -> None:
    for op in node.ops:
        if op.cost is not None and op.cost.flops:
            key = _packet(op.op)
            counts[key] = counts.get(key, 0) + op.cost.flops


def _packet(name: str) -> Any:
    """``"aten.mm.default" -> torch.ops.aten.mm``; the name itself if it is not a torch operator."""
    library, _, rest = name.partition(".")
    packet = rest.rsplit(".", 1)[0]
    return getattr(getattr(torch.ops, library, None), packet, name)

"""DeepSpeed's interface: ``get_model_profile`` and ``FlopsProfiler``.

Names, parameters, defaults, return values and the three printed parts are those of DeepSpeed's
flops profiler, so that its users only change an import.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from dispatch_flops.analysis.figures import inclusive
from dispatch_flops.analysis.latency import inexact_latencies, latency_of
from dispatch_flops.counting.parameters import elements_of
from dispatch_flops.errors import NotProfiledError, OutputError, OutputIsFolderError, TargetError
from dispatch_flops.operators.conventions import Conventions, Flops
from dispatch_flops.profile import Profile
from dispatch_flops.profile.holders import ProfileHolder
from dispatch_flops.profilers.counter import FlopCounterMode
from dispatch_flops.profilers.inputs import check_model
from dispatch_flops.profilers.model import exclude_modules, module_classes
from dispatch_flops.renderers import View, deepspeed
from dispatch_flops.renderers.deepspeed import aggregated, units
from dispatch_flops.renderers.terminal import printable
from dispatch_flops.renderers.text import at_least

_EXPERT_GROUP = "ep_size_"


class FlopsProfiler(ProfileHolder):
    """Profiler of a part of a program, such as one step of a training loop.

        profiler = FlopsProfiler(torch.nn.Linear(3, 5))
        profiler.start_profile()
        profiler.model(torch.ones(2, 3))
        profiler.stop_profile()
        profiler.get_total_macs()  # 2*3*5
        profiler.print_model_profile()
        profiler.end_profile()

    Counting and timing share one pass: the profiler's own overhead is measured and subtracted.

    model: the module to profile. ds_engine: the DeepSpeed engine that runs it, if one does. The
        printout then states the sizes of its world, groups and batch. Raises TargetError for
        anything else.
    recompute_fwd_factor: forward passes that DeepSpeed's estimate of the backward pass adds for
        activation checkpointing (default 0). Recomputation is counted without it.
    flops: see ``FlopCounterMode``. ``"contractions"`` is nearest to what DeepSpeed counts.

    Raises ConfigError for a ``flops`` or a ``recompute_fwd_factor`` that is not allowed.
    """

    def __init__(
        self,
        model: nn.Module,
        ds_engine: Any = None,
        recompute_fwd_factor: float = 0.0,
        *,
        flops: Flops = "all",
    ) -> None:
        check_model(model)
        _check_engine(ds_engine)
        deepspeed.make_view(recompute_fwd_factor=recompute_fwd_factor)  # raises for a wrong value
        self._counted: Flops = Conventions(flops=flops).flops
        self.model = model
        self.ds_engine = ds_engine
        self.flops: int | None = None
        self.macs: int | None = None
        self.params: int | None = None
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started: bool = False
        self._paused = False
        self._counter: FlopCounterMode | None = None
        self._ignored: Sequence[type[nn.Module]] = ()
        self._profile: Profile | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy gets: the profile so far, and nothing that runs."""
        if self._counter is None:
            return vars(self)
        stopped = {"_counter": None, "_profile": self.profile, "_paused": False, "started": False}
        return vars(self) | stopped

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start counting and timing; forget what was counted before.

        ignore_list: classes of modules to exclude, as ``ignore_modules`` of ``profile_model``.
        """
        self.drop_profile()
        self._ignored = module_classes("ignore_list", ignore_list)
        counter = FlopCounterMode(self.model, display=False, latency=True, flops=self._counted)
        counter.__enter__()
        self._counter = counter
        self._paused = False
        self.started = True

    def pause_profile(self) -> None:
        """Run the program unprofiled until ``resume_profile``; do nothing if not started."""
        if self._counter is not None:
            self._counter.pause()
            self._paused = True

    def resume_profile(self) -> None:
        """Continue counting and timing after ``pause_profile``."""
        if self._counter is not None:
            self._counter.resume()
            self._paused = False

    def stop_profile(self) -> None:
        """Stop counting and timing; the profile stays until the next start.

        Raises WrongThreadError in another thread than the one that started the profile, and
        WrongPlaceError in an inference mode or backward pass that began later: it goes on then.
        """
        counter = self._counter
        if counter is None:
            return
        counter.check_leaving()
        self._counter = None

        def keep() -> None:
            self._profile = exclude_modules(counter.profile, self.model, self._ignored)

        with followed_by(keep):
            counter.__exit__(None, None, None)

    def reset_profile(self) -> None:
        """Forget what was counted. A running profile starts anew; a paused one stays paused."""
        self._profile = None
        if self._counter is not None:
            paused = self._paused
            self.start_profile(self._ignored)
            if paused:
                self.pause_profile()

    def drop_profile(self) -> None:
        """Stop and forget what was counted, without a warning of uncounted operators.

        Raises as ``stop_profile`` does.
        """
        if self._counter is not None:
            self._counter.check_leaving()
            self._counter.pause()
        self._counter = self._profile = None
        self.started = False

    def end_profile(self) -> None:
        """Stop the profile if it is still running. The profile stays readable."""
        try:
            self.stop_profile()
        finally:
            self.started = self._counter is not None

    @property
    def profile(self) -> Profile:
        """The profile so far or, once stopped, the final one.

        Raises NotProfiledError before ``start_profile``.
        """
        if self._counter is not None:
            return exclude_modules(self._counter.profile, self.model, self._ignored)
        if self._profile is None:
            raise NotProfiledError(
                "nothing is profiled yet: call start_profile() and run the model first"
            )
        return self._profile

    def add_run_info(self, **facts: Any) -> None:
        """Set fields of the profile's ``RunInfo``.

        facts: values by the name of the field, such as ``batch_size=8``.

        Raises NotProfiledError before ``stop_profile``.
        """
        if self._counter is not None:
            raise NotProfiledError("the profile is still running: call stop_profile() first")
        profile = self.profile
        self._profile = dataclasses.replace(profile, run=dataclasses.replace(profile.run, **facts))

    @overload
    def get_total_flops(self, as_string: Literal[False] = False) -> int: ...
    @overload
    def get_total_flops(self, as_string: Literal[True]) -> str: ...
    @overload
    def get_total_flops(self, as_string: bool) -> int | str: ...

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the FLOPs of the model's forward pass, an int.

        as_string: return text with a unit instead; that of a lower bound begins with ">= ".
        """
        profile = self.profile
        total = profile.root.total("forward").flops
        return forward_string(profile, units.number_to_string(total)) if as_string else total

    @overload
    def get_total_macs(self, as_string: Literal[False] = False) -> int: ...
    @overload
    def get_total_macs(self, as_string: Literal[True]) -> str: ...
    @overload
    def get_total_macs(self, as_string: bool) -> int | str: ...

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the multiply-accumulates of the model's forward pass, an int.

        as_string: as for ``get_total_flops``.
        """
        profile = self.profile
        total = profile.root.total("forward").macs
        return forward_string(profile, units.macs_to_string(total)) if as_string else total

    @overload
    def get_total_duration(self, as_string: Literal[False] = False) -> float | None: ...
    @overload
    def get_total_duration(self, as_string: Literal[True]) -> str: ...
    @overload
    def get_total_duration(self, as_string: bool) -> float | str | None: ...

    def get_total_duration(self, as_string: bool = False) -> float | str | None:
        """Return the seconds of the model's forward pass; None if it did not run.

        as_string: return text with a unit instead, "n/a" for None.
        """
        profile = self.profile
        total = latency_of(profile.root)
        if not as_string:
            return total
        inexact = profile.root.fqn in inexact_latencies(profile.root, profile.timing)
        return f"{'~' if inexact else ''}{units.duration_to_string(total)}"

    @overload
    def get_total_params(self, as_string: Literal[False] = False) -> int: ...
    @overload
    def get_total_params(self, as_string: Literal[True]) -> str: ...
    @overload
    def get_total_params(self, as_string: bool) -> int | str: ...

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the number of elements of the model's distinct parameters.

        as_string: return text with a unit instead.
        """
        total = self.profile.total_params
        return units.params_to_string(total) if as_string else total

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | Path | None = None,
        fold: bool = False,
    ) -> None:
        """Print the profile: DeepSpeed's three parts and the operator table.

        Set ``flops``, ``macs`` and ``params``, the totals of the forward pass, as DeepSpeed does.

        profile_step: the number of the step that the heading names.
        module_depth, top_modules, detailed, output_file, fold: see ``get_model_profile``.

        A file that cannot be written is a warning, and the profile is printed instead.
        Raises NotProfiledError before ``start_profile``.
        """
        view = deepspeed.make_view(
            profile_step=profile_step,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
            fold=fold,
            recompute_fwd_factor=self.recompute_fwd_factor,
        )
        profile = self._profile_with_engine()
        total = profile.root.total("forward")
        self.flops, self.macs, self.params = total.flops, total.macs, profile.total_params
        write_or_warn(self._text(profile, view), output_file)

    def _text(self, profile: Profile, view: View) -> str:
        return deepspeed.render(profile, view)

    def _profile_with_engine(self) -> Profile:
        """Return the profile with the engine's facts, unless it holds some already."""
        profile = self.profile
        if self.ds_engine is None or profile.run.world_size is not None:
            return profile
        facts = engine_facts(self.ds_engine, self.model, profile.root.calls or 1)
        return dataclasses.replace(profile, run=dataclasses.replace(profile.run, **facts))

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print only the part that aggregates modules by class at each level.

        module_depth: deepest level printed; -1 (the default) prints all.
        top_modules: classes printed per level.
        """
        view = deepspeed.make_view(module_depth=module_depth, top_modules=top_modules)
        print(printable(aggregated.render(self.profile, view)))


@contextmanager
def followed_by(finish: Callable[[], object]) -> Iterator[None]:
    """Call ``finish`` after the block, also if that raised a warning, as an error."""
    try:
        yield
    except Warning:
        finish()
        raise
    finish()


def _check_engine(engine: Any) -> None:
    if engine is not None and not hasattr(engine, "train_micro_batch_size_per_gpu"):
        raise TargetError(
            f"ds_engine is of type {type(engine).__name__}; pass the engine that "
            "deepspeed.initialize returned, or None"
        )


def engine_facts(engine: Any, model: nn.Module, micro_batches: int) -> dict[str, Any]:
    """Return the sizes of an engine's world, groups and batch as fields of ``RunInfo``.

    micro_batches: the micro-batches of the profiled part; the batch size counts all of them.
    """
    data_parallel = engine.dp_world_size
    if data_parallel is None:  # under sequence parallelism, which has one group for both
        data_parallel = engine.seq_dp_world_size
    facts: dict[str, Any] = {
        "rank": getattr(engine, "global_rank", 0),
        "world_size": engine.world_size,
        "data_parallel_size": data_parallel,
        "model_parallel_size": engine.mp_world_size or 1,
        "batch_size": engine.train_micro_batch_size_per_gpu() * micro_batches,
    }
    return facts | (_experts(engine, model) if engine.has_moe_layers else {})


def _experts(engine: Any, model: nn.Module) -> dict[str, Any]:
    """Return the numbers of expert parameters: on this rank, and in the whole model."""
    split = any(getattr(m, "enable_expert_tensor_parallelism", False) for m in model.modules())
    across = engine.mp_world_size if split else 1
    sizes = [(elements_of(p), _expert_parallel_size(p)) for p in model.parameters()]
    return {
        "expert_params": sum(elements for elements, ranks in sizes if ranks),
        "model_expert_params": across * sum(elements * ranks for elements, ranks in sizes),
        "expert_tensor_parallel": across > 1,
    }


def _expert_parallel_size(parameter: Any) -> int:
    """Return the number of ranks that experts are spread over; 0 for other parameters."""
    group = str(getattr(parameter, "group_name", ""))
    size = group.removeprefix(_EXPERT_GROUP)
    return int(size) if group.startswith(_EXPERT_GROUP) and size.isdigit() else 0


def forward_string(profile: Profile, text: str) -> str:
    """Return a total of the forward pass, marked as the printout marks it."""
    return at_least(text, inclusive(profile.root, "forward")[profile.root.fqn].lower_bound)


def write_or_warn(text: str, output_file: str | Path | None) -> None:
    """Write the text to the file, or print it; a failure to write never ends a training loop."""
    try:
        print_or_write(text, output_file)
    except TargetError as error:
        warnings.warn(f"{error}; printed instead", stacklevel=2)
        print(printable(text))


def print_or_write(text: str, output_file: str | Path | None) -> None:
    """Print the text or, given a file, write it there; create the file's folder if needed.

    Raises OutputError, a TargetError and an OSError, if the file cannot be written, and TargetError
    for what is not a path.
    """
    path = path_to_write(output_file)
    if path is None:
        print(printable(text))
        return
    with _output_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def path_to_write(output_file: str | Path | None) -> Path | None:
    """Return the path of the file; None for stdout.

    Raises as ``print_or_write`` does, without writing, for what is not a path, for a folder, and
    for a file below another file.
    """
    if output_file is None or output_file == "":  # DeepSpeed's configurations have either
        return None
    if not isinstance(output_file, str | os.PathLike):
        raise TargetError(f"output_file={output_file!r:.60}: pass the path of a file, or None")
    path = Path(output_file)
    with _output_errors(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not next(folder for folder in path.parents if folder.exists()).is_dir():
            raise FileExistsError
    return path


@contextmanager
def _output_errors(path: Path) -> Iterator[None]:
    """Raise an error of the operating system as an OutputError."""
    try:
        yield
    except OSError as error:
        kind = OutputIsFolderError if isinstance(error, IsADirectoryError) else OutputError
        reason = "its folder is a file" if isinstance(error, FileExistsError) else error.strerror
        raise kind(error.errno, reason or str(error), str(path)) from error
    except ValueError as error:  # a null character in the path, or a text that is not Unicode
        raise OutputError(errno.EINVAL, str(error), str(path)) from error

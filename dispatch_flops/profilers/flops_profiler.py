"""The DeepSpeed-compatible face: ``get_model_profile`` and ``FlopsProfiler``.

Names, parameters, defaults, return values and the three printed parts are DeepSpeed's, so
that changing the import is all its users do; numbers are right where its are not.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dispatch_flops.analysis.latency import latency_of
from dispatch_flops.errors import NotProfiledError, TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.profilers.counter import FlopCounterMode
from dispatch_flops.profilers.model import module_classes, profile_model, without
from dispatch_flops.renderers import deepspeed
from dispatch_flops.renderers.deepspeed import aggregated, units


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | Path | None = None,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    mode: str = "forward",
    func_name: str | None = None,
    *,
    fold: bool = False,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """FLOPs, MACs and parameters of a model's forward pass (or of another of its methods).

    input_shape: shape of the only positional input, made of ones in the dtype and on the
        device of the model's first parameter. args, kwargs: the inputs themselves; a model
        without inputs needs none of the three.
    print_profile, detailed, module_depth, top_modules, output_file, fold: what is printed,
        and where to (a file instead of stdout).
    warm_up: runs before anything is measured.
    as_string: "426.52 MMACs" instead of 426516480.
    ignore_modules: classes of modules whose work, and that of all below them, is left out.
    mode, func_name: the method to call, ``"forward"`` for the model itself, ``"generate"``, ...
    options: further ones of ``profile_model``: ``device="meta"``, ``repeats``, ``causal``,
        ``operator_latency``, ``strict``, ...

    The model runs in evaluation mode; train flags and random state are as before afterwards.
    Raises TargetError for inputs that cannot be used.
    Returns ``(flops, macs, params)``.
    """
    profile = profile_model(
        model,
        input_shape,
        args,
        kwargs,
        warm_up=warm_up,
        ignore_modules=ignore_modules,
        mode=func_name or mode,
        **options,
    )
    if print_profile:
        view = deepspeed.make_view(
            profile_step=warm_up,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
            fold=fold,
        )
        show(deepspeed.render(profile, view), output_file)
    total = profile.root.total("forward")
    params = profile.total_params
    if not as_string:
        return total.flops, total.macs, params
    return (
        units.number_to_string(total.flops),
        units.macs_to_string(total.macs),
        units.params_to_string(params),
    )


class FlopsProfiler:
    """Profiles part of a program, such as one step of a training loop.

        prof = FlopsProfiler(model)
        prof.start_profile()
        loss = model(batch)
        prof.stop_profile()
        prof.print_model_profile()
        prof.end_profile()

    model: the module to profile. ds_engine: a DeepSpeed engine, which knows world size, batch
    size and the latencies of backward and step. recompute_fwd_factor: what DeepSpeed's estimate
    adds to the backward pass for activation checkpointing; counted recomputation needs none.

    Counting and timing share the pass; the profiler's own time is measured and taken off.
    """

    def __init__(
        self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TargetError(f"model is a {type(model).__name__}; pass an nn.Module")
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._paused = False
        self._counter: FlopCounterMode | None = None
        self._ignored: Sequence[type[nn.Module]] = ()
        self._profile: Profile | None = None

    def start_profile(self, ignore_list: Sequence[type[nn.Module]] | None = None) -> None:
        """Start counting and timing. ignore_list: classes of modules to leave out."""
        self.drop_profile()
        self._ignored = module_classes(ignore_list)
        counter = FlopCounterMode(self.model, display=False, latency=True)
        counter.__enter__()
        self._counter = counter
        self._paused = False
        self.started = True

    def pause_profile(self) -> None:
        """Let the program run unprofiled until ``resume_profile``; nothing if not started."""
        if self._counter is not None:
            self._counter.pause()
            self._paused = True

    def resume_profile(self) -> None:
        """Go on counting and timing."""
        if self._counter is not None:
            self._counter.resume()
            self._paused = False

    def stop_profile(self) -> None:
        """Stop counting and timing; the numbers stay until the next start."""
        counter = self._counter
        if counter is None:
            return
        counter.pause()  # in another thread this raises, and the counter stays
        self._counter = None
        try:
            counter.__exit__(None, None, None)  # raises where warnings are errors
        finally:
            self._profile = without(counter.profile, self.model, self._ignored)

    def reset_profile(self) -> None:
        """Forget what was counted; while profiling, count from here on, or stay paused."""
        self._profile = None
        if self._counter is not None:
            paused = self._paused
            self.start_profile(self._ignored)
            if paused:
                self.pause_profile()

    def drop_profile(self) -> None:
        """Stop and forget what was counted: nothing is warned of."""
        self.pause_profile()
        self._counter = self._profile = None
        self.started = False

    def end_profile(self) -> None:
        """Stop, if still running. Nothing was written on the model, so nothing is cleaned up."""
        try:
            self.stop_profile()
        finally:
            self.started = self._counter is not None

    @property
    def profile(self) -> Profile:
        """The frozen profile; raises NotProfiledError before anything was profiled."""
        if self._counter is not None:
            return without(self._counter.profile, self.model, self._ignored)
        if self._profile is None:
            raise NotProfiledError(
                "nothing is profiled yet: call start_profile(), run the model, then ask"
            )
        return self._profile

    def amend_scope(self, **known: Any) -> None:
        """Add what the caller knows of the run: fields of ``RunInfo``, such as ``batch_size``.

        After ``stop_profile``; raises NotProfiledError before it.
        """
        if self._counter is not None:
            raise NotProfiledError("the profile is not done: call stop_profile() first")
        profile = self.profile
        self._profile = dataclasses.replace(profile, run=dataclasses.replace(profile.run, **known))

    def get_total_flops(self, as_string: bool = False) -> Any:
        """FLOPs of the model's forward pass."""
        total = self.profile.root.total("forward").flops
        return units.number_to_string(total) if as_string else total

    def get_total_macs(self, as_string: bool = False) -> Any:
        """Multiply-accumulates of the model's forward pass."""
        total = self.profile.root.total("forward").macs
        return units.macs_to_string(total) if as_string else total

    def get_total_duration(self, as_string: bool = False) -> Any:
        """Seconds of the model's forward pass; None (as a string "n/a") if it was not run."""
        total = latency_of(self.profile.root)
        return units.duration_to_string(total) if as_string else total

    def get_total_params(self, as_string: bool = False) -> Any:
        """Elements of the model's distinct parameters."""
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
        """Print the three parts and the operator table, to stdout or to ``output_file``."""
        view = deepspeed.make_view(
            profile_step=profile_step,
            module_depth=module_depth,
            top_modules=top_modules,
            detailed=detailed,
            fold=fold,
        )
        report(deepspeed.render(self.profile, view), output_file)

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the part that aggregates modules by class at each depth."""
        view = deepspeed.make_view(module_depth=module_depth, top_modules=top_modules)
        print(aggregated.render(self.profile, view))


def report(text: str, output_file: str | Path | None) -> None:
    """As ``show``, but in a training loop, which goes on: what cannot be written is printed."""
    try:
        show(text, output_file)
    except TargetError as error:
        warnings.warn(f"{error}; printed instead", stacklevel=2)
        print(text)


def show(text: str, output_file: str | Path | None) -> None:
    """To the file, its folder made if need be, or to stdout; TargetError where it cannot be."""
    if output_file is None:
        print(text)
        return
    path = Path(output_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise TargetError(f"output_file={str(path)!r}: {error.strerror or error}") from error

"""Profile one call of a model: time it without the dispatch mode, then count it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from dispatch_flops.counting.eager_stance import eager_runs, eager_stance
from dispatch_flops.counting.module_names import ModuleNames
from dispatch_flops.counting.wrappers import find_submodule
from dispatch_flops.errors import ConfigError, TargetError, UncountedOpsError
from dispatch_flops.operators.conventions import Causal, Flops, Subclass, Target
from dispatch_flops.operators.registry import Formula
from dispatch_flops.profile import OUTSIDE, ModuleNode, PhaseSeconds, Profile, StepTiming
from dispatch_flops.profile.memory import FollowMemory
from dispatch_flops.profile.merging import sum_ops
from dispatch_flops.profilers.counter import FlopCounterMode
from dispatch_flops.profilers.inputs import BoundCalls, bind_inputs, check_model
from dispatch_flops.profilers.isolation import (
    garbage_collection_later,
    isolated,
    preserving_gradients,
)
from dispatch_flops.profilers.uncounted import describe_uncounted
from dispatch_flops.timing.calibrated import ModulePass
from dispatch_flops.timing.calibration import resolution_s
from dispatch_flops.timing.devices import Devices
from dispatch_flops.timing.latencies import (
    fit_to_whole,
    medians,
    spreads,
    time_calls,
    within_parents,
)

UNTIMED = StepTiming(method="n/a: tensors without data take no time")
SEPARATE_PASS = "a separate pass without the dispatch mode; for the whole model, also without hooks"
SEPARATE_PASS_COMPILED = (
    f"{SEPARATE_PASS}; the whole model's is that of compiled code, divided among modules in "
    "proportion to their eager latencies"
)


def profile_model(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mode: str = "forward",
    backward: bool = False,
    device: str | None = None,
    warm_up: int = 1,
    repeats: int = 1,
    operator_latency: bool = False,
    ignore_modules: Sequence[type[nn.Module]] | None = None,
    causal: Causal = "full",
    flops: Flops = "all",
    subclass: Subclass = "executed",
    custom_mapping: Mapping[Any, Formula] | None = None,
    meta_value: float | None = None,
    target: Target = "cpu",
    strict: bool = False,
    memory: FollowMemory = False,
    memory_rounding: int = 1,
    notify: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Return the profile of one call of a model.

        profile = profile_model(torch.nn.Linear(3, 5), input_shape=(2, 3), backward=True)
        profile.root.total("forward").macs  # 2*3*5

    The model is first timed without the dispatch mode, then counted. It runs in evaluation mode;
    train flags, random state and gradients are as before afterwards.

    model: the module to profile; it may be compiled.
    input_shape: shape of the only positional input, a tensor of ones with the dtype and on the
        device of the model's first floating-point parameter.
    args, kwargs: the inputs themselves, instead of ``input_shape``. A model without inputs needs
        none of the three.
    mode: name of the method to call; ``"forward"`` calls the model itself. What a method runs
        outside of modules is the model's own.
    backward: also run backward, from the sum of the outputs that require a gradient.
    device: ``"meta"`` counts from shapes alone: no data, no memory, no latencies. None (the
        default) runs the model where it is.
    warm_up: calls before the first measurement.
    repeats: timed calls; each latency is their median.
    operator_latency: also time every operator, while counting.
    ignore_modules: classes of modules to exclude, with everything below them. Their parameters
        are still counted, and the latencies of the modules above include theirs.
    causal, flops, subclass, custom_mapping, meta_value, target, strict, memory, memory_rounding:
        see ``FlopCounterMode``.
    notify: is told what runs next: ``"warm-up 1 of 3"``, ``"timing 5 calls"``, ``"counting"``.

    Latencies in the profile are in seconds, None where nothing was measured.
    Raises TargetError for a model or inputs that cannot be used, ConfigError for the value of an
    option, UncountedOpsError if ``strict`` is true and an operator has no known cost.
    """
    device = None if device is None else str(device)
    check_model(model)
    _check_options(device, warm_up, repeats, notify)
    excluded = module_classes("ignore_modules", ignore_modules)
    counter = FlopCounterMode(
        model,
        display=False,
        custom_mapping=custom_mapping,
        causal=causal,
        flops=flops,
        subclass=subclass,
        meta_value=meta_value,
        target=target,
        memory=memory,
        memory_rounding=memory_rounding,
        latency=operator_latency and device != "meta",
    )
    with isolated(model, on_meta=device == "meta"):
        calls = bind_inputs(
            model, input_shape, args, kwargs, mode=mode, backward=backward, device=device
        )
        devices = Devices.at("meta") if device == "meta" else Devices.of(model.modules())
        with preserving_gradients(calls.leaves):
            seconds, spread, timing = _time(
                model, calls, devices, warm_up, repeats, notify, is_method=mode != "forward"
            )
            notify("counting")
            profile = _count(calls, counter, devices)
    if mode != "forward" or not profile.root.calls:
        profile = _with_method(profile)
    profile = attach_latencies(profile, seconds, timing, spread)
    profile = exclude_modules(profile, model, excluded)
    if strict and profile.uncounted_ops():
        raise UncountedOpsError(describe_uncounted(profile))
    return profile


def module_classes(name: str, given: Any) -> tuple[type[nn.Module], ...]:
    """Return the classes that a parameter gives as a list, as one class, or as None."""
    if given is None:
        return ()
    classes = tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
        raise TargetError(
            f"{name}={given!r:.100}: pass a list of module classes, such as [nn.Linear]"
        )
    return classes


def _check_options(device: str | None, warm_up: int, repeats: int, notify: Any) -> None:
    if device not in (None, "meta"):
        raise TargetError(
            f'device={device!r:.60}: only "meta" is converted to; for any other device move the '
            "model and its inputs there first"
        )
    check_calls("warm_up", warm_up, 0)
    check_calls("repeats", repeats, 1)
    if not callable(notify):
        raise ConfigError(f"notify={notify!r:.60}: pass a function that is told what runs")


def check_calls(name: str, value: Any, least: int) -> None:
    """Raise ConfigError for what is not a number of calls."""
    if not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}={value!r:.60}: pass an int of at least {least}")


def _time(
    model: nn.Module,
    calls: BoundCalls,
    devices: Devices,
    warm_up: int,
    repeats: int,
    notify: Callable[[str], None],
    *,
    is_method: bool,
) -> tuple[dict[str, float], dict[str, float], StepTiming]:
    """Return latencies per module, their relative spreads, and the timing of the whole call."""
    if not devices.computes:
        return {}, {}, UNTIMED
    for number in range(warm_up):
        notify(f"warm-up {number + 1} of {warm_up}")
        calls.profiled()
    notify(f"timing {repeats} calls" if repeats > 1 else "timing a call")
    if calls.has_backward:
        calls.forward()  # the last backward freed its graph's memory: have it allocated again
    forward_s, spread_s = time_calls(calls.forward, repeats, devices.clock())
    backward_s = None
    if calls.has_backward:
        whole_s, _ = time_calls(calls.profiled, repeats, devices.clock())
        backward_s = max(whole_s - forward_s, 0.0)
    before = eager_runs()
    names, passes = _time_modules(model, calls, devices, repeats)
    is_compiled = eager_runs() > before
    measured = medians(passes)
    if is_method or "" not in measured:  # hooks tell of ``forward``, which is at most a part
        measured[""] = forward_s
    seconds = within_parents(fit_to_whole(measured, forward_s), names)
    timing = StepTiming(
        seconds=PhaseSeconds({"forward": forward_s, "backward": backward_s}),
        spread_s=spread_s,
        repeats=repeats,
        method=SEPARATE_PASS_COMPILED if is_compiled else SEPARATE_PASS,
        resolution_s=resolution_s(devices),
    )
    return seconds, spreads(passes), timing


def _time_modules(
    model: nn.Module, calls: BoundCalls, devices: Devices, repeats: int
) -> tuple[ModuleNames, list[dict[str, float]]]:
    """Return the names of the modules and, for each eager forward call, their latencies."""
    passes = []
    for _ in range(repeats):
        names = ModuleNames([model])
        with (
            eager_stance(),
            # The hooks allocate objects, which would trigger a collection sooner than the model.
            garbage_collection_later(),
            ModulePass(names, devices=devices) as clock,
        ):
            devices.synchronize()
            calls.forward()
        passes.append(clock.seconds())
    return names, passes


def _count(calls: BoundCalls, counter: FlopCounterMode, devices: Devices) -> Profile:
    """Return the profile of one call; its devices are those of the model with its data."""
    with counter:
        calls.profiled()
    profile = counter.profile
    run = dataclasses.replace(
        profile.run, device=devices.type, device_name=devices.name, **calls.facts
    )
    notes = profile.notes
    if (method := profile.timing.method) is not None:
        notes += (f"operator latencies: {method}",)
    return dataclasses.replace(profile, run=run, notes=notes)


def _with_method(profile: Profile) -> Profile:
    """Return the profile with what ran in no module, but in the method, as the model's own.

    No hook tells when a method other than ``forward`` runs, or a class's own ``__call__``.
    """
    ops = sum_ops((*profile.root.ops, *profile.outside.ops))
    return dataclasses.replace(
        profile,
        root=dataclasses.replace(profile.root, ops=ops),
        outside=dataclasses.replace(profile.outside, ops=()),
    )


def attach_latencies(
    profile: Profile,
    seconds: Mapping[str, float],
    timing: StepTiming,
    spread: Mapping[str, float] | None = None,
) -> Profile:
    """Return the profile with forward latencies and with the timing of the whole call.

    Latencies of modules in the counting pass are dropped: those of two passes do not add up.
    Operators keep theirs.

    seconds: ``{fqn: seconds}``.
    spread: ``{fqn: fraction}`` of the latency by which repeated calls vary.
    """
    shares = spread or {}

    def change(node: ModuleNode) -> ModuleNode:
        latency_s, share = seconds.get(node.fqn), shares.get(node.fqn)
        spread_s = None if latency_s is None or share is None else share * latency_s
        timed = PhaseSeconds({"forward": latency_s})
        return dataclasses.replace(node, seconds=timed, latency_spread_s=spread_s)

    return dataclasses.replace(profile.map_nodes(change), timing=timing)


def exclude_modules(
    profile: Profile, model: nn.Module, classes: Sequence[type[nn.Module]]
) -> Profile:
    """Return the profile without the operators in modules of these classes.

    Everything below these modules is excluded, too. Their parameters stay.
    """
    if not classes:
        return profile
    excluded = [
        node.fqn for node in profile.root.walk() if type(find_submodule(model, node.fqn)) in classes
    ]
    if not excluded:
        return profile
    prefixes = tuple(f"{fqn}." for fqn in excluded)

    def change(node: ModuleNode) -> ModuleNode:
        below = node.fqn.startswith(prefixes)
        if below or node.fqn in excluded or ("" in excluded and not node.fqn.startswith(OUTSIDE)):
            return dataclasses.replace(node, ops=(), seconds=PhaseSeconds(), latency_spread_s=None)
        return node

    names = ", ".join(fqn or "the model" for fqn in excluded)
    note = f"excluded by ignore_modules: {names}; latencies of the modules above include theirs"
    changed = profile.map_nodes(change)
    return dataclasses.replace(changed, notes=(*profile.notes, note))

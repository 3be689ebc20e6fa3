"""Every counter of multiply-accumulates behind one interface, each in a separate process.

A counter is imported in a forked process. Every workload is counted in a further fork of it, so
that patches, hooks and crashes end with their process.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import re
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.probes.probe import total_of

SECONDS = 300  # limit for one workload under one counter

Reading = int | str  # MACs, or the reason why there are none


class Workload(Protocol):
    """Model and inputs with their true number of MACs.

    backward: also run the backward pass. own_macs: ``{custom operator: MACs of its arguments}``.
    """

    name: str
    macs: int
    backward: bool
    own_macs: Callable[[], Mapping[Any, Callable[..., int]]]

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]: ...


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A counter and how to call it.

    package: its version is printed; without it the counter is skipped. ready: imports the counter.
    count: returns the MACs of a workload. backward: whether it measures backward passes.
    """

    package: str
    ready: Callable[[], Any]
    count: Callable[[Workload], Reading]
    backward: bool = False


def _run(workload: Workload, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    out = model(*inputs)
    if workload.backward:
        total_of(out).backward()


def ours(workload: Workload) -> Reading:
    """Return model MACs, forward and backward, or the uncounted operators if there are any."""
    from dispatch_flops import FlopCounterMode
    from dispatch_flops.profile.cost import contraction

    def formula(macs: Callable[..., int]) -> Callable[..., Any]:
        return lambda *args, out: contraction(macs(*args))

    model, inputs = workload.build()
    formulas = {op: formula(macs) for op, macs in workload.own_macs().items()}
    with FlopCounterMode(model, display=False, custom_mapping=formulas) as counter:
        _run(workload, model, inputs)
    missing = counter.profile.uncounted_ops()
    return counter.profile.model_total().macs if not missing else f"lists {', '.join(missing)}"


def torch_counter(workload: Workload) -> Reading:
    """Return half of torch.utils.flop_counter's FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    def formula(macs: Callable[..., int]) -> Callable[..., int]:
        return lambda *shapes, out_shape=None: (
            2 * macs(*(torch.empty(s, device="meta") for s in shapes))
        )

    model, inputs = workload.build()
    formulas = {op: formula(macs) for op, macs in workload.own_macs().items()}
    with FlopCounterMode(model, display=False, custom_mapping=formulas) as counter:
        _run(workload, model, inputs)
    return int(counter.get_total_flops()) // 2


def deepspeed(workload: Workload) -> Reading:
    """Return get_model_profile's MACs, or half its FLOPs where it counts only those."""
    from deepspeed.profiling.flops_profiler import get_model_profile

    model, inputs = workload.build()
    flops, macs, _ = get_model_profile(
        model, args=list(inputs), print_profile=False, as_string=False, warm_up=0
    )
    if macs == 0 and flops > 0 and workload.macs:
        return f"0 (FLOPs/2: {flops / 2 / workload.macs:.2f})"
    return int(macs)


def fvcore(workload: Workload) -> Reading:
    """Return FlopCountAnalysis's total; its flop is a MAC."""
    from fvcore.nn import FlopCountAnalysis

    model, inputs = workload.build()
    analysis = FlopCountAnalysis(model, inputs)
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return int(analysis.tracer_warnings("none").total())


class _Unpacking(nn.Module):
    """Module that takes all inputs as one tuple, because ptflops passes one argument."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, packed: tuple[Any, ...]) -> Any:
        return self.inner(*packed)


def ptflops(workload: Workload) -> Reading:
    """Return get_model_complexity_info's total from its aten backend; its flop is a MAC.

    ptflops prints the exceptions that it meets instead of raising them.
    """
    from ptflops import get_model_complexity_info

    model, inputs = workload.build()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        macs, _ = get_model_complexity_info(
            _Unpacking(model),
            (1,),
            print_per_layer_stat=False,
            as_strings=False,
            input_constructor=lambda _: inputs,
            backend="aten",
        )
    if macs is None:
        raised = re.search(r"<class '(?:.*\.)?(\w+)'>", printed.getvalue())
        return f"crash: {raised[1] if raised else 'unknown'}"
    return int(macs)


def calflops(workload: Workload) -> Reading:
    """Return calculate_flops' MACs; a backward pass is its estimate, twice the forward."""
    from calflops import calculate_flops

    model, inputs = workload.build()
    _, macs, _ = calculate_flops(
        model,
        args=list(inputs),
        print_results=False,
        output_as_string=False,
        include_backPropagation=workload.backward,
    )
    return int(macs)


def _importing(name: str) -> Callable[[], Any]:
    return lambda: __import__(name)


COUNTERS = {
    "dispatch_flops": Counter(
        package="dispatch-flops",
        ready=_importing("dispatch_flops.operators.formulas"),
        count=ours,
        backward=True,
    ),
    "torch": Counter(
        package="torch",
        ready=_importing("torch.utils.flop_counter"),
        count=torch_counter,
        backward=True,
    ),
    "DeepSpeed": Counter(
        package="deepspeed",
        ready=_importing("deepspeed.profiling.flops_profiler"),
        count=deepspeed,
    ),
    "fvcore": Counter(package="fvcore", ready=_importing("fvcore.nn"), count=fvcore),
    "ptflops (aten)": Counter(package="ptflops", ready=_importing("ptflops"), count=ptflops),
    "calflops": Counter(
        package="calflops", ready=_importing("calflops"), count=calflops, backward=True
    ),
}


def versions() -> dict[str, str]:
    """Return the versions of the installed counters and of torch."""
    found = {}
    for package in [counter.package for counter in COUNTERS.values()]:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def installed() -> list[str]:
    """Return the counters that can run here. This package needs no installation."""
    present = versions()
    return [n for n, c in COUNTERS.items() if c.count is ours or c.package in present]


def readings(name: str, workloads: Sequence[Workload]) -> list[Reading]:
    """Return the reading of counter ``name`` for each workload."""
    found = _in_fork(_read_all, name, workloads, seconds=SECONDS * len(workloads))
    return [found] * len(workloads) if isinstance(found, str) else found


def _read_all(name: str, workloads: Sequence[Workload]) -> list[Reading]:
    _quietly()
    counter = COUNTERS[name]
    counter.ready()
    found: list[Reading] = []
    for workload in workloads:
        if workload.backward and not counter.backward:
            found.append("n/a")
            continue
        found.append(_in_fork(counter.count, workload, seconds=SECONDS))
    return found


def _quietly() -> None:
    """Silence this process, which must be a fork: peers print, log and warn."""
    import logging

    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    sys.stdout = sys.stderr = io.StringIO()
    torch.set_num_threads(1)


def _in_fork(call: Callable[..., Any], *args: Any, seconds: float) -> Any:
    """Return ``call(*args)`` run in a fork, or the name of what it raised."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, call, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            process.kill()
            return "crash: no end"
        return receiver.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        return f"crash: {signal.Signals(-code).name if code < 0 else f'exit {code}'}"
    finally:
        process.join()


def _send(sender: Any, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = call(*args)
    except Exception as raised:
        result = f"crash: {type(raised).__name__}"
    sender.send(result)

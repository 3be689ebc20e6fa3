"""Run torch's operator and module databases under the counter.

For every sample of ``op_db`` and ``module_db``, the counter must not change what the program
computes. It must not raise where the operator does not, and must know every overload that runs.
Results are compared with those under an empty ``TorchDispatchMode``, because torch itself takes
other paths in a few places under any mode.
"""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from dispatch_flops import FlopCounterMode, Profile
from tests.end_to_end.sweep.sampling import SEED, one_in
from tests.helpers.untouched import EmptyMode

DTYPES = (torch.float32, torch.bfloat16, torch.complex64, torch.int64)
# torch does not reproduce these itself: uninitialised memory, and the last bits of LAPACK's
# least squares. Only the shapes of their results are compared.
UNREPRODUCIBLE = frozenset(
    """
    empty empty_like empty_permuted empty_strided new_empty new_empty_strided linalg.lstsq
    """.split()
)


@dataclass(frozen=True)
class Case:
    """One operator (or module) of a database, one dtype, one way to call it.

    variant: "function", "inplace" or "out" for operators, "train" or "eval" for modules.
    """

    kind: str
    name: str
    dtype: torch.dtype
    variant: str
    info: Any = field(repr=False, compare=False)

    @property
    def id(self) -> str:
        return f"{self.name}-{self.variant}-{str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Outcome:
    """Result and random state of a program, in bits; ``error`` is the type of what it raised."""

    values: tuple[Any, ...] = ()
    error: str = ""


@dataclass
class Report:
    """Findings about one case or many."""

    samples: int = 0
    raised: int = 0
    kinds: dict[str, str] = field(default_factory=dict)
    unknown: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def merge(self, other: Report) -> None:
        """Add the findings of ``other``."""
        self.samples += other.samples
        self.raised += other.raised
        self.kinds.update(other.kinds)
        self.unknown.update(other.unknown)
        self.errors.update(other.errors)
        self.changed.extend(other.changed)


# -- the cases -----------------------------------------------------------------------------


@lru_cache(maxsize=1)
def all_cases() -> tuple[Case, ...]:
    """Return every operator and module of torch's databases, in a fixed order."""
    return (*_operator_cases(), *_module_cases())


def cases_by_name() -> dict[tuple[str, str], list[Case]]:
    """Group the cases by kind and name of their operator or module."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in all_cases():
        found.setdefault((case.kind, case.name), []).append(case)
    return found


def _operator_cases() -> Iterator[Case]:
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        name = info.formatted_name
        supported = info.supported_dtypes("cpu")
        for dtype in DTYPES:
            if dtype in supported:
                yield Case("op", name, dtype, "function", info)
        if torch.float32 in supported:
            if info.inplace_variant is not None:
                yield Case("op", name, torch.float32, "inplace", info)
            if info.supports_out:
                yield Case("op", name, torch.float32, "out", info)


def _module_cases() -> Iterator[Case]:
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        for dtype in (torch.float32, torch.bfloat16):
            if dtype in info.dtypes:
                yield Case("module", info.name, dtype, "train", info)
                yield Case("module", info.name, dtype, "eval", info)


# -- one case ------------------------------------------------------------------------------


def examine(case: Case, *, every: int = 1) -> Report:
    """Run one sample in ``every`` of a case, under an empty mode and under the counter."""
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, program in one_in(every, list(enumerate(programs_in(case))), case=case.id):
            report.samples += 1
            plain, _ = observe(program, EmptyMode)
            report.raised += bool(plain.error)
            counted, counter = observe(program, lambda: FlopCounterMode(display=False))
            # Under an empty mode torch takes lazy conjugates for the tensors themselves in pinv.
            if counted != plain and counted != observe(program, contextlib.nullcontext)[0]:
                what = f"{plain.error or 'result'} != {counted.error or 'result'}"
                report.changed.append(f"{case.id} sample {index}: {what}")
            _note(report, counter.profile.check())
    return report


def programs_in(case: Case) -> Iterator[Callable[[], Any]]:
    seed_all()
    try:
        yield from (_module_programs if case.kind == "module" else _operator_programs)(case)
    except Exception:
        return  # the database cannot make (more) samples of this dtype


def _operator_programs(case: Case) -> Iterator[Callable[[], Any]]:
    grad = is_differentiable(case)
    for sample in samples_of(case, grad):
        if case.variant == "inplace" and sample.broadcasts_input:
            continue
        yield lambda sample=sample: call(case, sample, grad)


def samples_of(case: Case, grad: bool) -> Iterator[Any]:
    """Yield the samples of an operator.

    Not by ``info.sample_inputs``, which looks for a test's name in the stack and seeds the
    devices before every sample: that takes longer than the samples themselves.
    """
    yield from case.info.sample_inputs_func(case.info, "cpu", case.dtype, grad)


def is_differentiable(case: Case) -> bool:
    supported = case.dtype in case.info.supported_backward_dtypes("cpu")
    return case.variant == "function" and supported and case.info.supports_autograd


def call(case: Case, sample: Any, grad: bool) -> Any:
    input, args, kwargs = _fresh((sample.input, sample.args, sample.kwargs))
    if case.variant == "inplace":
        return case.info.inplace_variant(input, *args, **kwargs)
    result = case.info(input, *args, **kwargs)
    if case.variant == "out":
        out = tree_map_only(torch.Tensor, torch.zeros_like, result)
        result = case.info(input, *args, out=out, **kwargs)
    grads = []
    if grad:
        leaves = [t for t in tensors((input, args, kwargs)) if t.requires_grad and t.is_leaf]
        backward(sample.output_process_fn_grad(result))
        grads = [leaf.grad for leaf in leaves]
    if case.info.name in UNREPRODUCIBLE:
        return [t.shape for t in tensors((result, grads))]
    return result, grads


def _module_programs(case: Case) -> Iterator[Callable[[], Any]]:
    info, training = case.info, case.variant == "train"
    samples = info.module_inputs_func(
        info, device="cpu", dtype=case.dtype, requires_grad=True, training=training
    )
    for sample in samples:
        if sample.forward_input is None:
            continue
        yield lambda sample=sample: _train(info.module_cls, sample, case.dtype, training)


def _train(cls: Any, sample: Any, dtype: torch.dtype, training: bool) -> Any:
    built = sample.constructor_input
    module = cls(*built.args, **built.kwargs).to(dtype).train(training)
    args, kwargs = _fresh((sample.forward_input.args, sample.forward_input.kwargs))
    result = module(*args, **kwargs)
    backward(result)
    grads = [t.grad for t in (*tensors((args, kwargs)), *module.parameters()) if t.is_leaf]
    return result, grads, dict(module.state_dict())


def _note(report: Report, profile: Profile) -> None:
    for total in profile.op_totals():
        report.kinds[total.op] = total.kind
    report.unknown.update(profile.uncounted_ops())
    report.errors.update(profile.formula_errors())


def compare_devices(case: Case, *, every: int = 1) -> Report:
    """Compare the counts of a case with those on the meta device and in inference mode.

    Forward and backward run on meta, only forward in inference mode. ``raised`` counts the
    samples that meta tensors cannot run because the operator looks at data.
    """
    report = Report()
    grad = is_differentiable(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        seed_all()
        samples = list(enumerate(samples_of(case, grad)))
        for index, sample in one_in(every, samples, case=case.id):
            report.samples += 1
            differences = _differences(case, sample, grad)
            report.raised += "raised" in differences
            report.changed += [f"{case.id} sample {index}: {d}" for d in differences - {"raised"}]
    return report


def _differences(case: Case, sample: Any, grad: bool) -> set[str]:
    with torch.no_grad():
        forward = _counts(case, sample, False)
    with torch.inference_mode():
        inferred = _counts(case, sample, False)
    found = set() if inferred == forward else {f"{forward}, in inference mode {inferred}"}
    here = _counts(case, sample, grad) if grad else forward
    there = _counts(case, _on_meta(sample), grad)
    if there is None:
        return found | {"raised"}
    return found if there == here else found | {f"{here}, on meta {there}"}


def _counts(case: Case, sample: Any, grad: bool) -> tuple[int, int, tuple[str, ...]] | None:
    """Return MACs, FLOPs and the unknown overloads; None if the program raises."""
    outcome, counter = observe(
        lambda: (call(case, sample, grad), None)[1], lambda: FlopCounterMode(display=False)
    )
    if outcome.error:
        return None
    total = counter.profile.model_total()  # a fused backward also recomputes
    return total.macs, total.flops, tuple(counter.profile.uncounted_ops())


def _on_meta(sample: Any) -> Any:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to("meta").requires_grad_(leaf.requires_grad)

    moved = sample.transform(move)
    if "device" in moved.kwargs:
        moved.kwargs["device"] = "meta"
    return moved


# -- running and comparing -----------------------------------------------------------------


def observe(
    program: Callable[[], Any], mode: Callable[[], contextlib.AbstractContextManager[Any]]
) -> tuple[Outcome, Any]:
    """Run a program inside a mode, from the same random state every time."""
    seed_all()
    entered = mode()
    try:
        with entered:
            result = program()
    except Exception as error:
        return Outcome(error=type(error).__name__), entered
    return Outcome(values=(*bits(result), *bits(torch.get_rng_state()))), entered


def seed_all() -> None:
    """Set the random state in which samples are made and run.

    ``torch.manual_seed`` would format the stack once for every device that is not initialised.
    """
    torch.default_generator.manual_seed(SEED)
    random.seed(SEED)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(SEED)


def backward(result: Any) -> None:
    """Run backward from every differentiable tensor of a result."""
    roots = [t for t in tensors(result) if t.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _fresh(value: Any) -> Any:
    """Return a copy with new leaf tensors, so that one run does not affect the next.

    A deep copy keeps strides, overlaps and shared memory. It is not of the program: modes do not
    see it.
    """
    memo: dict[int, Any] = {}

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.detach()
        if tensor.layout is torch.strided and not tensor.is_nested:
            own = copy.deepcopy(plain, memo)
        else:
            own = plain.clone()
        return own.requires_grad_(tensor.requires_grad)

    with _disable_current_modes():
        return tree_map_only(torch.Tensor, copied, value)


def bits(value: Any) -> Iterator[Any]:
    """Yield a result as comparable data: NaN equals NaN, and -0 differs from 0."""
    for leaf in tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            yield repr(leaf)
        elif leaf.layout is not torch.strided:
            yield str(leaf.layout)
            yield from bits(_parts(leaf))
        else:
            dense = leaf.detach().resolve_conj().resolve_neg()
            yield (leaf.dtype, leaf.shape, leaf.stride())
            flat = dense.clone(memory_format=torch.contiguous_format).flatten()
            yield flat.view(torch.uint8).numpy().tobytes()


def _parts(sparse: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sparse = sparse.detach()
    if sparse.layout is torch.sparse_coo:
        return sparse._indices(), sparse._values()
    if sparse.layout in (torch.sparse_csr, torch.sparse_bsr):
        return sparse.crow_indices(), sparse.col_indices(), sparse.values()
    if sparse.layout in (torch.sparse_csc, torch.sparse_bsc):
        return sparse.ccol_indices(), sparse.row_indices(), sparse.values()
    return tuple(sparse.unbind()) if sparse.is_nested else (sparse.to_dense(),)


# -- the report ----------------------------------------------------------------------------


def coverage_report(every: int = 1) -> Report:
    """Examine one sample in ``every`` of all cases together."""
    report = Report()
    for case in all_cases():
        report.merge(examine(case, every=every))
    return report


def coverage_text(report: Report) -> str:
    """Format a report: overloads by kind, unknown ones, differences."""
    kinds = Counter(report.kinds.values())
    lines = [
        f"{report.samples} samples ({report.raised} raised, as they do without the counter), "
        f"{len(report.kinds)} overloads"
    ]
    lines += [f"  {kind:<10} {count}" for kind, count in sorted(kinds.items())]
    for title, found in (
        ("no formula", [f"{op} ({calls} calls)" for op, calls in sorted(report.unknown.items())]),
        ("formula raised", [f"{op}: {error}" for op, error in sorted(report.errors.items())]),
        ("not the same as under an empty mode", report.changed),
    ):
        lines.append(f"{title}: {len(found) or 'none'}")
        lines += [f"  {line}" for line in found]
    return "\n".join(lines)

"""Composite operators of the libraries that torch ships beside aten.

None of them gets a kernel that observes its calls, as those of extensions do. So each must consist
of operators that a dispatch mode sees, or compute nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines quantized_decomposed
import torch.distributed as dist
from torch._ops import OpOverload

from dispatch_flops import _torch
from dispatch_flops.operators import composites
from dispatch_flops.operators.registry import lookup
from dispatch_flops.operators.tensors import tensors_in
from tests.helpers.profiling import profile_of

if dist.is_available():
    import torch.distributed._functional_collectives  # defines c10d_functional

T, K, RANKS = 3, 5, 4
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}
decomposed = torch.ops.quantized_decomposed
X = torch.rand(T, K)


def fake_quantize(x: torch.Tensor) -> torch.Tensor:
    scales, zeros = torch.full((K,), 0.1), torch.zeros(K, dtype=torch.int32)
    result: torch.Tensor = decomposed.fake_quant_per_channel(x, scales, zeros, 1, -128, 127)
    return result


# Operators that compute, with their FLOPs.
COMPUTING: dict[str, tuple[Callable[[], Any], int]] = {
    # Each row: two extrema of K values, extended to include 0. Its scale: a difference, a quotient,
    # a lower bound. Its zero point: the extrema over the scale, the error of either, their sum and
    # its sign, a candidate from either, two bounds and a rounding.
    "quantized_decomposed._choose_qparams_per_token_asymmetric_impl.default": (
        lambda: decomposed._choose_qparams_per_token_asymmetric_impl(X, torch.int8),
        T * (2 * (K - 1) + 2 + 3 + 2 + 2 + 2 + 2 + 3),
    ),
    # 1.0 / scales is a reciprocal and a product. Each element: 5 to quantise, 2 to dequantise, and
    # two comparisons that tell which gradients pass.
    "quantized_decomposed.fake_quant_per_channel.default": (
        lambda: fake_quantize(X),
        2 * K + (5 + 2 + 2) * T * K,
    ),
    "_test.leaky_relu.default": (lambda: torch.ops._test.leaky_relu(X), 2 * T * K),
}
# Operators with a tensor as result that only show or move elements, and have no declaration.
MOVING = {"_test.cat.default", "inductor._alloc_from_pool.default"}
HAS_NO_KERNEL_BELOW_AUTOGRAD = "quantized_decomposed.fake_quant_per_channel.default"


def composites_of_torch() -> Iterator[OpOverload]:
    for name in _torch.all_operator_names():
        library, _, rest = name.partition("::")
        if library in composites._OF_TORCH - {"aten"}:
            packet, _, overload = rest.partition(".")
            found = getattr(getattr(torch.ops, library), packet, None)
            op = getattr(found, overload or "default", None)
            if op is not None and composites.is_taken_apart(op):
                yield op


def returns_tensors(op: OpOverload) -> bool:
    return any("Tensor" in str(returned.type) for returned in op._schema.returns)


def test_every_composite_of_torchs_libraries_has_a_test_or_computes_nothing() -> None:
    """A torch with a new operator of this kind fails here: find out whether it is counted."""
    unknown = []
    for op in composites_of_torch():
        rule = lookup(op)
        is_free = rule is not None and rule.kind == "free"
        has_test = str(op) in COMPUTING or op.namespace == "c10d_functional"
        if returns_tensors(op) and not (is_free or has_test or str(op) in MOVING):
            unknown.append(str(op))
    assert unknown == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", COMPUTING)
def test_composite_of_torchs_library_is_counted_by_its_parts(name: str, mode: str) -> None:
    if mode == "inference_mode" and name == HAS_NO_KERNEL_BELOW_AUTOGRAD:
        pytest.skip("torch runs it only with autograd")
    call, flops = COMPUTING[name]
    with MODES[mode]():
        profile = profile_of(call, strict=True)
    assert profile.total().flops == flops
    assert name not in profile.by_operator()


def test_backward_of_an_autograd_kernel_of_torchs_library_is_counted() -> None:
    x = X.clone().requires_grad_()
    out = fake_quantize(x)
    profile = profile_of(lambda: out.backward(torch.ones(T, K)), strict=True)
    assert profile.total("backward").flops == T * K  # the gradient times the mask


@pytest.fixture
def group() -> Iterator[str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


COLLECTIVES: dict[str, tuple[Callable[[Any, torch.Tensor, list[int], str], Any], str, int]] = {
    "all_reduce": (lambda op, x, to, _: op(x, "sum", "", to, RANKS), "all_reduce", 1),
    "all_reduce_coalesced": (
        lambda op, x, to, _: op([x, x], "sum", "", to, RANKS),
        "all_reduce",
        2,
    ),
    "all_gather_into_tensor": (lambda op, x, to, _: op(x, "", to, RANKS), "all_gather", RANKS),
    "all_gather_into_tensor_coalesced": (
        lambda op, x, to, _: op([x, x], "", to, RANKS),
        "all_gather",
        2 * RANKS,
    ),
    "reduce_scatter_tensor": (
        lambda op, x, to, _: op(x, "sum", "", to, RANKS),
        "reduce_scatter",
        1,
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda op, x, to, _: op([x, x], "sum", "", to, RANKS),
        "reduce_scatter",
        2,
    ),
    "all_to_all_single": (
        lambda op, x, to, _: op(x, None, None, "", to, RANKS),
        "all_to_all",
        1,
    ),
    "broadcast": (lambda op, x, to, _: op(x, 0, "", to, RANKS), "broadcast", 1),
    "isend": (lambda op, x, _, group: op(x, 1, 0, group), "send", 1),
    "irecv": (lambda op, x, _, group: op(x, 1, 0, group), "recv", 1),
    "batch_p2p_ops": (lambda op, x, _, group: op(["isend"], [1], [0], [x], group), "send", 1),
}
OLD = "c10d_functional::"


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
@pytest.mark.filterwarnings("ignore")
class TestCollectivesOfTheOldNames:
    def test_each_of_them_is_listed_here(self) -> None:
        found = {op.name() for op in composites_of_torch()}
        names = {name.removeprefix(OLD) for name in found if name.startswith(OLD)}
        assert names <= COLLECTIVES.keys() | {"wait_tensor"}

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", COLLECTIVES)
    def test_its_communication_is_recorded(self, name: str, mode: str, group: str) -> None:
        if not hasattr(torch.ops.c10d_functional, name):
            pytest.skip("this torch does not have it")
        call, kind, times = COLLECTIVES[name]
        with MODES[mode]():
            x = torch.ones(2 * RANKS, K)
            op = getattr(torch.ops.c10d_functional, name)

            def communicate() -> None:
                for out in tensors_in(call(op, x, list(range(RANKS)), group)):
                    torch.ops.c10d_functional.wait_tensor(out)

            profile = profile_of(communicate, strict=True)
        (sent,) = profile.communication
        assert (sent.kind, sent.calls, sent.payload_bytes) == (kind, 1, times * x.nbytes)

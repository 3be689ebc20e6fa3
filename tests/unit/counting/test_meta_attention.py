"""Attention on tensors without data is counted as the kernel that a device would choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from dispatch_flops import FlopCounterMode, get_model_profile
from dispatch_flops.errors import ConfigError
from dispatch_flops.profilers.model import profile_model

attention = nn.functional.scaled_dot_product_attention
B, H, HKV, SQ, SK, D = 2, 6, 3, 5, 7, 8
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
FULL_MACS = B * H * SQ * SK * 2 * D


def operands(
    device: str,
    *,
    kv_heads: int = H,
    sk: int = SK,
    d: int = D,
    dtype: Any = None,
    grad: bool = True,
) -> list[torch.Tensor]:
    sizes = ((H, SQ, d), (kv_heads, sk, d), (kv_heads, sk, d))
    return [torch.zeros(B, *size, device=device, dtype=dtype, requires_grad=grad) for size in sizes]


def mask(device: str, dtype: torch.dtype = torch.bool) -> torch.Tensor:
    return torch.ones(SQ, SK, device=device, dtype=dtype)


def summary(run: Callable[[], Any], **options: Any) -> dict[Any, Any]:
    """Return the calls and the cost of each operator in each phase."""
    with FlopCounterMode(display=False, **options) as counter:
        run()
    # Tensors without data are given new ones where data would be copied; allocation is free.
    return {
        (total.phase, total.op): (total.calls, total.cost)
        for total in counter.profile.op_totals()
        if total.cost is None or total.cost.flops or total.cost.bytes_read
    }


def step(device: str, **options: Any) -> Callable[[], Any]:
    """Return a forward and backward call of attention on ``device``."""
    sizes = {
        name: options.pop(name) for name in ("kv_heads", "sk", "d", "dtype") if name in options
    }
    q, k, v = operands(device, **sizes)
    if "mask" in options:
        options["attn_mask"] = mask(device, options.pop("mask"))
    return lambda: attention(q, k, v, **options).sum().backward()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"mask": torch.bool},
        {"mask": torch.float32},
        {"kv_heads": HKV, "enable_gqa": True},
        {"dtype": torch.bfloat16},
        pytest.param(
            {"dtype": torch.float64, "scale": 0.5},
            marks=pytest.mark.skipif(
                TORCH < (2, 12), reason="torch 2.11 gives the logsumexp float32 on meta"
            ),
        ),
        {"dropout_p": 0.25},  # the math path
        {"dropout_p": 0.25, "kv_heads": HKV, "enable_gqa": True, "mask": torch.bool},
    ],
)
@pytest.mark.parametrize("causal", ["full", "half"])
def test_attention_on_meta_costs_what_it_costs_on_cpu(options: Any, causal: Any) -> None:
    on_cpu = summary(step("cpu", **options), causal=causal)
    assert summary(step("meta", **options), causal=causal) == on_cpu


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"mask": torch.bool}, {"dropout_p": 0.25}])
def test_attention_on_meta_without_gradients_costs_what_it_costs_on_cpu(
    context: Any, options: Any
) -> None:
    def run(device: str) -> Any:
        options_here = dict(options)
        if "mask" in options_here:
            options_here["attn_mask"] = mask(device, options_here.pop("mask"))
        with context():
            attention(*operands(device), **options_here)

    assert summary(lambda: run("meta")) == summary(lambda: run("cpu"))


def test_attention_on_meta_counts_the_causal_half() -> None:
    q, k, v = (torch.empty(B, H, SQ, D, device="meta") for _ in range(3))
    with FlopCounterMode(display=False, causal="half") as counter:
        attention(q, k, v, is_causal=True)
    assert counter.get_total_macs() == B * H * (SQ * (SQ + 1) // 2) * 2 * D


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpointed_attention_on_meta_costs_what_it_costs_on_cpu(is_reentrant: bool) -> None:
    def run(device: str) -> Any:
        q, k, v = operands(device)
        checkpoint(attention, q, k, v, use_reentrant=is_reentrant).sum().backward()

    on_meta = summary(lambda: run("meta"))
    assert on_meta == summary(lambda: run("cpu"))
    assert ("recompute", "aten._scaled_dot_product_flash_attention_for_cpu.default") in on_meta


def test_function_transform_of_attention_on_meta_costs_what_it_costs_on_cpu() -> None:
    def run(device: str) -> Any:
        q, k, v = operands(device, grad=False)
        torch.func.grad(lambda q: attention(q, k, v).sum())(q)

    assert summary(lambda: run("meta")) == summary(lambda: run("cpu"))


def test_attention_module_on_meta_costs_what_it_costs_on_cpu() -> None:
    def run(device: str) -> Any:
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True, device=device)
        layer(torch.zeros(2, 5, 12, device=device)).sum().backward()

    assert summary(lambda: run("meta")) == summary(lambda: run("cpu"))


def test_choice_of_sdpa_kernel_is_respected_on_meta() -> None:
    def run(device: str) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            step(device)()

    on_meta = summary(lambda: run("meta"))
    assert on_meta == summary(lambda: run("cpu"))
    assert ("forward", "aten.bmm.default") in on_meta


def test_result_on_meta_is_like_the_one_on_cpu() -> None:
    for device in ("cpu", "meta"):
        q = torch.zeros(B, SQ, H, D, device=device, requires_grad=True).transpose(1, 2)
        with FlopCounterMode(display=False):
            out = attention(q, q, q)
        assert (out.shape, out.dtype, out.device.type) == ((B, H, SQ, D), torch.float32, device)
        assert out.requires_grad
        assert out.stride() == (SQ * H * D, D, H * D, 1)


def test_invalid_attention_on_meta_raises_what_torch_raises() -> None:
    q, k, v = operands("meta")
    with pytest.raises(RuntimeError) as without:
        attention(q, k, v, attn_mask=mask("meta"), is_causal=True)
    with pytest.raises(RuntimeError) as counted, FlopCounterMode(display=False):
        attention(q, k, v, attn_mask=mask("meta"), is_causal=True)
    assert str(counted.value) == str(without.value)


# -- other devices' kernels ----------------------------------------------------------------


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"


def kernels_used(device: str, **options: Any) -> set[str]:
    """Return the operators with MACs."""
    with FlopCounterMode(display=False, target="cuda") as counter:
        step(device, **options)()
    return {
        total.op.split(".")[1]
        for total in counter.profile.op_totals()
        if total.phase == "forward" and total.cost is not None and total.cost.macs
    }


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({"dtype": torch.bfloat16}, FLASH),
        ({"dtype": torch.float16, "dropout_p": 0.25}, FLASH),
        ({"dtype": torch.bfloat16, "kv_heads": HKV, "enable_gqa": True}, FLASH),
        ({"dtype": torch.bfloat16, "d": 13}, FLASH),  # padded to 16
        ({"dtype": torch.bfloat16, "d": 264}, EFFICIENT),
        ({"dtype": torch.bfloat16, "mask": torch.bool}, EFFICIENT),
        ({"dtype": torch.bfloat16, "is_causal": True}, EFFICIENT),  # not square
        ({"dtype": torch.bfloat16, "mask": torch.bool, "d": 12}, "bmm"),
        ({}, EFFICIENT),
        ({"d": 12}, EFFICIENT),
        ({"d": 13}, "bmm"),
        ({"kv_heads": HKV, "enable_gqa": True}, "bmm"),
        ({"dtype": torch.bfloat16, "kv_heads": 1}, "bmm"),  # broadcast
        ({"dtype": torch.float64}, "bmm"),
    ],
)
def test_target_cuda_chooses_the_kernel_of_cuda(options: Any, kernel: str) -> None:
    assert kernels_used("meta", **options) == {kernel}


@pytest.mark.parametrize(
    ("options", "permitted", "kernel"),
    [
        ({"dtype": torch.bfloat16}, [SDPBackend.CUDNN_ATTENTION], CUDNN),
        ({"dtype": torch.bfloat16, "mask": torch.bool}, [SDPBackend.CUDNN_ATTENTION], CUDNN),
        ({"dtype": torch.bfloat16}, [SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], "bmm"),
        (
            {"dtype": torch.bfloat16},
            [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION],
            FLASH,
        ),
    ],
)
def test_target_cuda_leaves_to_cudnn_what_no_other_kernel_may_run(
    options: Any, permitted: list[SDPBackend], kernel: str
) -> None:
    with sdpa_kernel(permitted):
        assert kernels_used("meta", **options) == {kernel}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_target_cuda_counts_the_same_macs_as_cpu(dtype: Any) -> None:
    with FlopCounterMode(display=False, target="cuda") as counter:
        attention(*operands("meta", dtype=dtype))
    assert counter.get_total_macs() == FULL_MACS


@pytest.mark.parametrize(
    ("target", "kernel"),
    [
        ("cpu", "_scaled_dot_product_flash_attention_for_cpu"),
        ("cuda", FLASH),
    ],
)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])
def test_fake_attention_runs_the_kernel_of_the_target(
    target: Any, kernel: str, context: Any
) -> None:
    with FakeTensorMode(), context(), FlopCounterMode(display=False, target=target) as counter:
        attention(*operands("cpu", dtype=torch.bfloat16))
    assert counter.profile.by_operator()[f"aten.{kernel}.default"].calls == 1
    assert counter.get_total_macs() == FULL_MACS


def test_real_tensors_keep_their_kernel_under_target_cuda() -> None:
    q, k, v = operands("cpu")
    expected = attention(q, k, v)
    with FlopCounterMode(display=False, target="cuda") as counter:
        assert torch.equal(attention(q, k, v), expected)
    used = counter.profile.by_operator()
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" in used


def test_nested_counters_each_count_the_kernel() -> None:
    with (
        FlopCounterMode(display=False) as outer,
        FlopCounterMode(display=False) as inner,
    ):
        attention(*operands("meta"))
    with FlopCounterMode(display=False):
        pass
    assert outer.get_total_macs() == inner.get_total_macs() == FULL_MACS
    assert outer.profile.by_operator().keys() == inner.profile.by_operator().keys()


def test_kernels_of_attention_are_gone_after_the_block() -> None:
    name = "aten::scaled_dot_product_attention"
    keys = ("AutogradMeta", "AutogradOther", "AutogradCPU")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    with FlopCounterMode(display=False, target="cuda"):
        assert all(has_kernel(name, key) for key in keys)
    with pytest.raises(ZeroDivisionError), FlopCounterMode(display=False, target="cuda"):
        1 / 0  # noqa: B018
    assert not any(has_kernel(name, key) for key in keys)


def test_unknown_target_is_refused() -> None:
    with pytest.raises(ConfigError, match='target=\'tpu\': choose "cpu" or "cuda"'):
        FlopCounterMode(target="tpu")  # type: ignore[arg-type]


class Attention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x, is_causal=True)


def test_profilers_of_a_model_take_the_target() -> None:
    x = torch.zeros(B, H, SQ, D, dtype=torch.float64)  # CUDA has no fused kernel for float64
    options: dict[str, Any] = {"args": [x], "device": "meta", "causal": "half"}
    pairs = {"cpu": SQ * (SQ + 1) // 2, "cuda": SQ * SQ}
    for target, count in pairs.items():
        macs = B * H * count * 2 * D
        profile = profile_model(Attention(), **options, target=target)
        assert profile.total().macs == macs
        _, got, _ = get_model_profile(
            Attention(), print_profile=False, as_string=False, **options, target=target
        )
        assert got == macs

"""Tensor subclasses, counted as executed on inner tensors or as one logical operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import aot_function, nop
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dispatch_flops import FlopCounterMode, profile_model
from dispatch_flops.errors import ConfigError
from tests.helpers.profiling import profile_of
from tests.helpers.ranks import run_on_ranks

LENGTHS = (3, 7, 2)
D, F, HEADS = 8, 12, 2
ROWS = sum(LENGTHS)
PAIRS = sum(n * n for n in LENGTHS)


def ragged(layout: torch.layout, *, width: int = D, grad: bool = False) -> torch.Tensor:
    parts = [torch.ones(n, width) for n in LENGTHS]
    return torch.nested.nested_tensor(parts, layout=layout, requires_grad=grad)


LAYOUTS = [torch.strided, torch.jagged]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
class TestNested:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_nested_linear_counts_real_lengths(self, layout: torch.layout, mode: Any) -> None:
        layer = nn.Linear(D, F)
        with mode():
            profile = profile_of(layer, ragged(layout), model=layer)
        assert profile.total().macs == ROWS * D * F
        assert profile.uncounted_ops() == {}

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_nested_linear_backward_counts_real_lengths(self, layout: torch.layout) -> None:
        layer = nn.Linear(D, F)

        def run() -> None:
            out = layer(ragged(layout, grad=True))
            values = out.values() if layout is torch.jagged else out.to_padded_tensor(0.0)
            values.sum().backward()

        profile = profile_of(run, model=layer)
        assert profile.total("forward").macs == ROWS * D * F
        assert profile.total("backward").macs == 2 * ROWS * D * F

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_nested_attention_counts_real_lengths(self, layout: torch.layout) -> None:
        def run() -> None:
            if layout is torch.jagged:
                x = ragged(layout).unflatten(-1, (HEADS, D // HEADS)).transpose(1, 2)
            else:
                parts = [torch.ones(HEADS, n, D // HEADS) for n in LENGTHS]
                x = torch.nested.nested_tensor(parts, layout=layout)
            nn.functional.scaled_dot_product_attention(x, x, x)

        with torch.no_grad():
            assert profile_of(run).total().macs == 2 * PAIRS * D


class Quantized(torch.Tensor):
    """Weight stored as int8 with a scale, as in torchao."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_", "scale"], None

    def dequantize(self) -> torch.Tensor:
        return self.data_.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantized(args[0].data_, args[0].scale)
        if func is torch.ops.aten.t.default:
            return Quantized(args[0].data_.t(), args[0].scale.t())
        plain = [a.dequantize() if isinstance(a, Quantized) else a for a in args]
        return func(*plain, **(kwargs or {}))


class Movable(Quantized):
    """Weight that ``to`` moves to another device, and that ``empty_like`` cannot make there."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor) -> Movable:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, dtype=scale.dtype, device=data.device
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty_like.default:
            raise NotImplementedError(f"{func} of a Movable")
        if func is torch.ops.aten._to_copy.default:
            device = kwargs["device"]
            return Movable(args[0].data_.to(device), args[0].scale.to(device))
        if func is torch.ops.aten.detach.default:
            return Movable(args[0].data_, args[0].scale)
        return super().__torch_dispatch__(func, types, args, kwargs)


class TestQuantized:
    B = 3

    def layer(self) -> nn.Linear:
        layer = nn.Linear(D, F, bias=False)
        data, scale = torch.ones(F, D, dtype=torch.int8), torch.ones(F, 1)
        layer.weight = nn.Parameter(Quantized(data, scale), requires_grad=False)
        return layer

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize(("subclass", "dequantize"), [("executed", F * D), ("logical", 0)])
    def test_quantized_linear_counts_its_dequantization_if_executed(
        self, mode: Any, subclass: Any, dequantize: int
    ) -> None:
        layer = self.layer()
        with mode():
            profile = profile_of(layer, torch.ones(self.B, D), model=layer, subclass=subclass)
        assert profile.total().macs == self.B * D * F
        assert profile.total().flops == 2 * self.B * D * F + dequantize
        assert profile.root.active_params == F * D

    def test_quantized_weight_is_profiled_on_meta_where_it_can_only_be_moved(self) -> None:
        layer = nn.Linear(D, F, bias=False)
        weight = Movable(torch.ones(F, D, dtype=torch.int8), torch.ones(F, 1))
        layer.weight = nn.Parameter(weight, requires_grad=False)
        kept = layer.weight
        profile = profile_model(layer, (self.B, D), device="meta")
        assert profile.total().macs == self.B * D * F
        assert profile.total().flops == 2 * self.B * D * F + F * D  # and the dequantization
        assert layer.weight is kept

    def test_quantized_linear_counts_the_gradient_of_its_input(self) -> None:
        layer, x = self.layer(), torch.ones(self.B, D, requires_grad=True)
        profile = profile_of(lambda: layer(x).sum().backward(), model=layer)
        assert profile.total("forward").macs == self.B * D * F
        assert profile.total("backward").macs == self.B * D * F


@pytest.mark.parametrize(("subclass", "times"), [("executed", 2), ("logical", 1)])
def test_two_tensor_counts_twice_if_executed(subclass: Any, times: int) -> None:
    a, b = torch.ones(3, D), torch.ones(D, F)
    pair = TwoTensor(a, a.clone())
    profile = profile_of(lambda: pair @ b, subclass=subclass)
    assert profile.total().macs == times * 3 * D * F


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_run_decompositions_within_a_counter_counts_nothing() -> None:
    layer, x = nn.Linear(3, 4), torch.ones(2, 3)
    exported = torch.export.export(layer, (x,))
    with FlopCounterMode(display=False) as counter:
        core = exported.run_decompositions()
    assert torch.equal(core.module()(x), layer(x))
    assert counter.profile.total().macs == 0  # traced, not run
    assert profile_of(core.module(), x).total().macs == 2 * 3 * 4


@pytest.mark.parametrize("two", [1, 2])
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
def test_aot_autograd_within_a_counter_counts_executed_operators(two: int) -> None:
    x, w = torch.ones(2, 3), torch.ones(3, 4, requires_grad=True)
    x = TwoTensor(x, x) if two == 2 else x

    def loss(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sum()

    profile = profile_of(lambda: aot_function(loss, nop)(x, w).backward())
    assert profile.total().macs == two * (2 * 3 * 4 + 3 * 2 * 4)  # x @ w, and x.T @ the gradient
    assert w.grad is not None
    grad = w.grad.a if isinstance(w.grad, TwoTensor) else w.grad
    assert torch.equal(grad, torch.full((3, 4), 2.0))


def test_unknown_subclass_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="logical"):
        FlopCounterMode(subclass="global")  # type: ignore[arg-type]


WORLD, B, I, H = 8, 8, 64, 128  # noqa: E741


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(I, H)
        self.down = nn.Linear(H, I)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


FORWARD = 2 * B * I * H
BACKWARD = 3 * B * I * H  # no gradient for the input


@pytest.fixture
def ranks() -> Iterator[Any]:
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    yield init_device_mesh("cpu", (WORLD,))
    dist.destroy_process_group()


def tensor_parallel(ranks: Any, device: str = "cpu") -> nn.Module:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    with torch.device(device):
        model = MLP()
    return parallelize_module(model, ranks, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch.*")
class TestDTensor:
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    @pytest.mark.parametrize(("subclass", "share"), [("executed", WORLD), ("logical", 1)])
    def test_dtensor_training_counts_this_rank_or_the_whole(
        self, ranks: Any, device: str, subclass: Any, share: int
    ) -> None:
        model = tensor_parallel(ranks, device)
        x = torch.ones(B, I, device=device)
        run = lambda: model(x).sum().backward()  # noqa: E731
        for _ in range(2):  # DTensor propagates shapes the first time, and caches them
            profile = profile_of(run, model=model, subclass=subclass)
            assert profile.total("forward").macs == FORWARD // share
            assert profile.total("backward").macs == BACKWARD // share
            assert profile.node("up").total("forward").macs == FORWARD // 2 // share
            assert profile.uncounted_ops() == {}

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize(("subclass", "share"), [("executed", WORLD), ("logical", 1)])
    def test_dtensor_inference_counts_this_rank_or_the_whole(
        self, ranks: Any, mode: Any, subclass: Any, share: int
    ) -> None:
        model = tensor_parallel(ranks)
        with mode():
            profile = profile_of(model, torch.ones(B, I), model=model, subclass=subclass)
        assert profile.total().macs == FORWARD // share

    def test_dtensor_collectives_have_no_flops(self, ranks: Any) -> None:
        from torch.distributed.tensor import Shard, distribute_tensor

        a = distribute_tensor(torch.ones(64, 64), ranks, [Shard(0)])
        profile = profile_of(lambda: a @ a)  # gathers the right operand
        assert profile.total().macs == 64**3 // WORLD
        assert profile.total().flops == 2 * profile.total().macs
        assert any("all_gather" in op for op in profile.by_operator())

    def test_dtensor_optimizer_has_fewer_flops_on_one_rank_than_in_all(self, ranks: Any) -> None:
        model = tensor_parallel(ranks)
        optimizer = torch.optim.AdamW(model.parameters())

        def run() -> None:
            model(torch.ones(B, I)).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        executed, logical = (
            profile_of(run, model=model, subclass=choice) for choice in ("executed", "logical")
        )
        assert 0 < executed.total("optimizer").flops < logical.total("optimizer").flops

    def test_fsdp2_counts_this_rank(self, ranks: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        model = MLP()
        for part in (model.up, model.down, model):
            fully_shard(part)
        profile = profile_of(lambda: model(torch.ones(B, I)).sum().backward(), model=model)
        assert profile.total("forward").macs == FORWARD
        assert profile.total("backward").macs == BACKWARD
        assert profile.uncounted_ops() == {}
        assert profile.root.active_params == profile.total_params > 0

    def test_fsdp2_parameters_of_an_uncalled_module_are_not_active(self, ranks: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        model = MLP()
        for part in (model.up, model.down, model):
            fully_shard(part)
        profile = profile_of(lambda: model.up(torch.ones(B, I)), model=model)
        assert profile.root.active_params == profile.node("up").total_params
        assert profile.node("down").active_params == 0


def macs_of_this_rank() -> dict[str, list[int]]:
    """Return the MACs of forward and backward of one program, sharded in several ways."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def macs(model: nn.Module, **options: Any) -> list[int]:
        with FlopCounterMode(model, display=False, **options) as counter:
            model(torch.ones(B, I)).sum().backward()
        assert not counter.profile.uncounted_ops()
        return [counter.profile.total(phase).macs for phase in ("forward", "backward")]

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    split = parallelize_module(MLP(), mesh, plan)
    sharded = MLP()
    fully_shard(sharded)
    return {
        "split": macs(split),
        "whole": macs(split, subclass="logical"),
        "sharded": macs(sharded),
        "replicated": macs(nn.parallel.DistributedDataParallel(MLP())),
    }


@pytest.mark.slow
def test_two_processes_count_their_own_rank(tmp_path: Path) -> None:
    ranks = run_on_ranks(__file__, ["macs_of_this_rank"], 2, tmp_path).of("macs_of_this_rank")
    whole, half = [FORWARD, BACKWARD], [FORWARD // 2, BACKWARD // 2]
    assert ranks == 2 * [{"split": half, "whole": whole, "sharded": whole, "replicated": whole}]


def test_subclass_with_nested_in_its_name_is_not_a_nested_tensor() -> None:
    class NestedPair(TwoTensor):  # type: ignore[misc]
        pass

    pair = NestedPair(torch.ones(2, 3), torch.ones(2, 3))
    profile = profile_of(torch.mm, pair, torch.ones(3, 5), subclass="logical")
    assert profile.total().macs == 2 * 3 * 5

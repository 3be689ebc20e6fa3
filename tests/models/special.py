"""Models with special features: shared or frozen weights, recomputation, a mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.models.case import Case, images


class Shared(nn.Module):
    """One linear called three times."""

    def __init__(self, width: int = 100) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.layer(x)
        return x


class Renamed(nn.Linear):
    """A linear whose ``__repr__`` does not name its class."""

    def __repr__(self) -> str:
        return f"Renamed<{self.in_features}>"


class CustomRepr(nn.Module):
    """Three layers with their own ``__repr__`` in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Renamed(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


class CheckpointedMLP(nn.Module):
    """Blocks of two linears, each recomputed in the backward pass.

    Recomputation stops as soon as nothing more is needed: without re-entry that is before
    the last linear of each block, whose output no gradient wants.
    """

    def __init__(self, width: int, inner: int, blocks: int, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x

    @staticmethod
    def macs(rows: int, width: int, inner: int, blocks: int) -> int:
        return blocks * rows * 2 * width * inner

    def recomputed_macs(self, rows: int, width: int, inner: int, blocks: int) -> int:
        return blocks * rows * (1 + self.reentrant) * width * inner


class Lora(nn.Module):
    """A frozen linear, and a trained product of two thin ones added to it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.b(self.a(x))
        return out


class LoraStack(nn.Sequential):
    """Two LoRA linears: only the second needs the gradient of its input."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__(Lora(width, rank), Lora(width, rank))

    @staticmethod
    def macs(rows: int, width: int, rank: int) -> int:
        return 2 * rows * (width * width + 2 * width * rank)

    @staticmethod
    def gradient_macs(rows: int, width: int, rank: int) -> int:
        """First: da, db and b's input. Second: base's input, and both gradients of a and b."""
        thin = rows * width * rank
        return 3 * thin + rows * width * width + 4 * thin


class CifarMoE(nn.Module):
    """A small convolutional net with two residual mixtures of experts, as one rank of a group
    of two sees it: it holds half of the experts, and serves its peer's rows as well as its own.

    Both mixtures hold the same ``mlp``.
    """

    def __init__(self, experts: tuple[int, ...] = (4, 8)) -> None:
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(3, 6, 5), nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2 = nn.Linear(16 * 5 * 5, 120), nn.Linear(120, 84)
        shared = nn.Linear(84, 84)
        self.moe_layer_list = nn.ModuleList(MoE(84, shared, n) for n in experts)
        self.fc4 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc2(F.relu(self.fc1(x.flatten(1)))))
        for layer in self.moe_layer_list:
            x = layer(x)
        out: torch.Tensor = self.fc4(x)
        return out

    @staticmethod
    def module_macs(batch: int, experts: tuple[int, ...] = (4, 8)) -> dict[str, int]:
        """Return the inclusive MACs of every module that has any.

        An expert takes one row of each rank.
        """
        macs = {
            "conv1": batch * 6 * (28 * 28) * (3 * 5 * 5),
            "conv2": batch * 16 * (10 * 10) * (6 * 5 * 5),
            "fc1": batch * 400 * 120,
            "fc2": batch * 120 * 84,
            "fc4": batch * 84 * 10,
        }
        for i, n in enumerate(experts):
            moe = f"moe_layer_list.{i}"
            expert = 2 * 84 * 84
            parts = {
                f"{moe}.gate": batch * 84 * n,
                f"{moe}.experts": n // 2 * expert,
                f"{moe}.mlp": batch * 84 * 84,
                f"{moe}.coefficient": batch * 84 * 2,
            }
            macs |= parts | {f"{moe}.experts.{e}": expert for e in range(n // 2)}
            macs[moe] = sum(parts.values())
        macs["moe_layer_list"] = sum(macs[f"moe_layer_list.{i}"] for i in range(len(experts)))
        macs[""] = sum(n for name, n in macs.items() if "." not in name)
        return macs

    @staticmethod
    def module_params(experts: tuple[int, ...] = (4, 8)) -> dict[str, int]:
        """Return the parameters: the shared ``mlp`` is in each mixture, and once in the root."""
        linear = 84 * 84 + 84
        params = {
            "conv1": 6 * 75 + 6,
            "conv2": 16 * 150 + 16,
            "fc1": 400 * 120 + 120,
            "fc2": 120 * 84 + 84,
            "fc4": 84 * 10 + 10,
        }
        own = {f"moe_layer_list.{i}": 84 * n + n // 2 * linear + 170 for i, n in enumerate(experts)}
        total = sum(params.values()) + sum(own.values()) + linear
        params["moe_layer_list"] = sum(own.values()) + linear
        for i, n in enumerate(experts):
            params[f"moe_layer_list.{i}.gate"] = 84 * n
            params[f"moe_layer_list.{i}.experts"] = n // 2 * linear
            params[f"moe_layer_list.{i}.coefficient"] = 84 * 2 + 2
        return {**params, **{name: n + linear for name, n in own.items()}, "": total}


class MoE(nn.Module):
    """Top-1 gate, experts with room for one row of each rank, and a parallel perceptron."""

    RANKS = 2

    def __init__(self, width: int, mlp: nn.Module, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts // self.RANKS))
        self.mlp = mlp
        self.coefficient = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.gate(x).softmax(-1).argmax(-1)
        # One place for each expert of the group; a later row that wants it takes it over.
        places = x.new_zeros(self.gate.out_features, x.shape[1])
        places = places.index_copy(0, choice, x)
        # The exchange between ranks: the peer sends as many rows as it gets.
        rows = places.reshape(self.RANKS, len(self.experts), -1)
        done = torch.stack([expert(rows[:, i]) for i, expert in enumerate(self.experts)], 1)
        routed = done.flatten(0, 1).index_select(0, choice)
        share = self.coefficient(x).softmax(-1)
        out: torch.Tensor = routed * share[:, :1] + self.mlp(x) * share[:, 1:]
        return out


_MOE = CifarMoE.module_macs(4)

CASES = (
    Case(
        name="shared linear",
        make=Shared,
        inputs=lambda: (torch.ones(1, 100),),
        macs=3 * 100 * 100,
        params=100 * 100 + 100,
        gradient_macs=3 * 100 * 100 + 2 * 100 * 100,
        modules={"layer": 3 * 100 * 100},
        runs_for_real=True,
    ),
    Case(
        name="custom repr",
        make=CustomRepr,
        inputs=lambda: (torch.ones(16, 64),),
        macs=16 * (3 * 64 * 64 + 64 * 8),
        params=3 * (64 * 64 + 64) + 64 * 8 + 8,
        gradient_macs=16 * (5 * 64 * 64 + 2 * 64 * 8),
        modules={"layers": 16 * 3 * 64 * 64, "layers.1": 16 * 64 * 64},
        runs_for_real=True,
    ),
    Case(
        name="LoRA",
        make=lambda: LoraStack(24, 3),
        inputs=lambda: (torch.ones(5, 24),),
        macs=LoraStack.macs(5, 24, 3),
        params=2 * (24 * 24 + 24 + 2 * 24 * 3),
        gradient_macs=LoraStack.gradient_macs(5, 24, 3),
        runs_for_real=True,
    ),
    Case(
        name="mixture of experts",
        make=CifarMoE,
        inputs=images(4, 3, 32),
        macs=_MOE[""],
        params=CifarMoE.module_params()[""],
        modules=_MOE,
        runs_for_real=True,
    ),
)

"""Random trees of modules that state their own MACs.

Every module says, when it is called, what it multiplies and which gradients its backward will
need. The statements use products of sizes and ``requires_grad``, and nothing of the package.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Stated = dict[str, dict[str, int]]


class Statements:
    """MACs that the modules of a model state: ``{fqn: {phase: MACs}}``.

    path: the modules that are running, by the names under which their callers hold them.
    phase: "forward", or "recompute" while the backward pass runs.
    keeps_graph: False while a function runs again whose first call made the graph.
    """

    def __init__(self) -> None:
        self.found: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.path: tuple[str, ...] = ()
        self.phase = "forward"
        self.keeps_graph = True

    def product(self, macs: int, *operands: Tensor, at: str = "") -> None:
        """State a product, and one more in backward for each operand that needs a gradient."""
        needed = sum(operand.requires_grad for operand in operands)
        self.work(macs, macs * needed, at=at)

    def work(self, macs: int, backward: int, *, again: int = 0, at: str = "") -> None:
        """State MACs here or in the child ``at``: now, in backward, and again within backward."""
        stated = self.found[".".join((*self.path, *([at] if at else [])))]
        stated[self.phase] += macs
        if torch.is_grad_enabled() and self.keeps_graph:
            stated["backward"] += backward
            stated["recompute"] += again

    def attention(self, pairs: int, *operands: Tensor) -> None:
        """State a fused attention: two products, four in backward, and the scores again."""
        needed = any(operand.requires_grad for operand in operands)
        self.work(2 * pairs, 4 * pairs * needed, again=pairs * needed)

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Run the child that the running module holds under ``name``."""
        before, self.path = self.path, (*self.path, name)
        try:
            yield
        finally:
            self.path = before

    @contextlib.contextmanager
    def resumed(self, path: tuple[str, ...], keeps_graph: bool) -> Iterator[None]:
        """Run a checkpointed function as it was called at ``path``."""
        before = self.path, self.keeps_graph
        self.path, self.keeps_graph = path, keeps_graph
        try:
            yield
        finally:
            self.path, self.keeps_graph = before

    def table(self) -> Stated:
        """Return what was stated, without the zeros."""
        nonzero = {
            fqn: {phase: macs for phase, macs in phases.items() if macs}
            for fqn, phases in self.found.items()
        }
        return {fqn: phases for fqn, phases in nonzero.items() if phases}


class Module(nn.Module):
    """A module of a random tree: maps x[B, T, D] to its shape."""

    def __init__(self, statements: Statements, width: int) -> None:
        super().__init__()
        self.statements = statements
        self.width = width


class Perceptron(Module):
    def __init__(self, statements: Statements, width: int) -> None:
        super().__init__(statements, width)
        self.up, self.down = nn.Linear(width, 3), nn.Linear(3, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        macs = x.numel() * 3
        self.statements.product(macs, x, self.up.weight, at="up")
        hidden = torch.relu_(self.up(x))
        self.statements.product(macs, hidden, self.down.weight, at="down")
        return self.down(hidden)


class Convolution(Module):
    def __init__(self, statements: Statements, width: int) -> None:
        super().__init__(statements, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        self.statements.product(x.numel() * self.width // 2 * 3, x, self.conv.weight, at="conv")
        return self.conv(x.mT).mT


class Recurrent(Module):
    def __init__(self, statements: Statements, width: int) -> None:
        super().__init__(statements, width)
        self.cell = nn.GRUCell(width, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        # oneDNN's backward of a layer computes the gradients of input and weights together.
        macs = x.numel() * 4 * 2 * self.width
        self.statements.work(
            macs, 2 * macs * (x.requires_grad or self.lstm.weight_ih_l0.requires_grad), at="lstm"
        )
        y = self.lstm(x)[0]
        first, then = y[:, 0], y[:, -1]
        macs = first.numel() * 3 * self.width
        self.statements.product(macs, first, self.cell.weight_ih, at="cell")
        self.statements.product(macs, then, self.cell.weight_hh, at="cell")
        return y + self.cell(first, then)[:, None]


class SelfAttention(Module):
    """Products of tensors that the module computes itself, from a parameter that it holds."""

    def __init__(self, statements: Statements, width: int) -> None:
        super().__init__(statements, width)
        self.mix = nn.Parameter(torch.randn(width, width) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        self.statements.product(x.numel() * width, x, self.mix)
        q = torch.einsum("btd,de->bte", x, self.mix)
        pairs = batch * time * time * width
        self.statements.product(pairs, q, x)
        weights = torch.softmax(q @ x.mT, -1)
        self.statements.product(pairs, weights, x)
        return torch.bmm(weights, x)


class FusedAttention(Module):
    """The CPU's fused kernel; it takes contiguous heads."""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        self.statements.attention(batch * time * time * width, x)
        heads = x.contiguous().view(batch, time, 2, width // 2).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return out.transpose(1, 2).reshape(x.shape)


class Normalised(Module):
    """No product at all: norms, an embedding of positions, work in place."""

    def __init__(self, statements: Statements, width: int) -> None:
        super().__init__(statements, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.GroupNorm(2, width)])
        self.batch = nn.BatchNorm1d(width)
        self.positions = nn.Embedding(16, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x) + self.positions(torch.arange(x.shape[1]))
        y = self.batch(self.norms[1](y.mT)).mT.clone()
        return y.mul_(0.5).add_(x)


class Hooked(Module):
    """Hooks of its own multiply what goes in and what comes out."""

    def __init__(self, statements: Statements, width: int) -> None:
        super().__init__(statements, width)
        self.matrix = torch.eye(width)
        self.register_forward_pre_hook(lambda module, args: (self._times(args[0]),))
        self.register_forward_hook(lambda module, args, out: self._times(out))

    def _times(self, x: Tensor) -> Tensor:
        self.statements.product(x.numel() * self.width, x, self.matrix)
        return x @ self.matrix

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


LEAVES: tuple[Callable[[Statements, int], Module], ...] = (
    Perceptron, Convolution, Recurrent, SelfAttention, FusedAttention, Normalised, Hooked,
)  # fmt: skip
HOW = ("plainly", "plainly", "residual", "nested", "no_grad", "checkpoint", "reentrant")


class Tree(Module):
    """Calls its children in any order, some several times, some never, each in one of ``HOW``."""

    def __init__(self, statements: Statements, width: int, random: Random, pool: list[Module],
                 depth: int) -> None:  # fmt: skip
        super().__init__(statements, width)
        self.parts = nn.ModuleList()
        for _ in range(random.randint(1, 3)):
            part = _random_part(statements, width, random, pool, depth)
            if part not in self.parts:  # held twice by one parent, it has only one name
                self.parts.append(part)
        names = [str(random.randrange(len(self.parts))) for _ in range(random.randint(1, 4))]
        self.calls = [(f"parts.{name}", random.choice(HOW)) for name in names]

    def forward(self, x: Any) -> Tensor:
        if isinstance(x, dict):  # nested inputs
            x = x["of"][0] + x["of"][1]["more"]
        for name, how in self.calls:
            x = getattr(self, f"_{how}")(name, x)
        return x

    def _plainly(self, name: str, x: Any) -> Tensor:
        with self.statements.inside(name):
            return self.get_submodule(name)(x)

    def _residual(self, name: str, x: Tensor) -> Tensor:
        return x + self._plainly(name, x)

    def _nested(self, name: str, x: Tensor) -> Tensor:
        if isinstance(self.get_submodule(name), Tree):
            return self._plainly(name, {"of": [x, {"more": x * 0.5}]})
        return self._plainly(name, x)

    def _no_grad(self, name: str, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self._plainly(name, x)
        return x + y

    def _checkpoint(self, name: str, x: Tensor) -> Tensor:
        """The first call makes the graph; later ones only compute its tensors again."""
        return checkpoint(self._resumable(name), x, use_reentrant=False, early_stop=False)

    def _reentrant(self, name: str, x: Tensor) -> Tensor:
        """The first call runs without gradients; the later one makes the graph."""
        return x + checkpoint(self._resumable(name, is_reentrant=True), x, use_reentrant=True)

    def _resumable(self, name: str, *, is_reentrant: bool = False) -> Callable[[Tensor], Tensor]:
        path = self.statements.path
        keeps_graph = [self.statements.keeps_graph]

        def run(x: Tensor) -> Tensor:
            with self.statements.resumed(path, is_reentrant or any(keeps_graph)):
                keeps_graph.clear()
                return self._plainly(name, x)

        return run


def _random_part(
    statements: Statements, width: int, random: Random, pool: list[Module], depth: int
) -> Module:
    if pool and random.random() < 0.2:
        return random.choice(pool)  # another part of the tree holds it, too
    if depth and random.random() < 0.5:
        part: Module = Tree(statements, width, random, pool, depth - 1)
    else:
        part = random.choice(LEAVES)(statements, width)
    pool.append(part)
    if random.random() < 0.25:
        part.requires_grad_(False)
    return part


def random_model(random: Random) -> tuple[Tree, Tensor, Statements]:
    """Return a model, an input for it, and where it states its MACs."""
    statements = Statements()
    width = random.choice((4, 6, 10))
    model = Tree(statements, width, random, [], depth=3)
    model.train(random.random() < 0.7)
    x = torch.randn(random.randint(1, 3), random.choice((3, 5, 7)), width)
    return model, x.requires_grad_(random.random() < 0.5), statements


def run(model: Tree, x: Tensor, statements: Statements) -> None:
    """Run forward, and backward where something needs a gradient."""
    statements.phase = "forward"
    loss = model(x).square().sum()
    statements.phase = "recompute"
    if loss.requires_grad:
        loss.backward()

"""A graph transformer on torch_geometric's ``TransformerConv``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, kw_only=True)
class GraphShape:
    """Sizes of the model and its input; the heads of each layer are averaged."""

    features: int
    width: int
    heads: int
    layers: int
    nodes: int
    edges: int
    rows: int

    def module_macs(self) -> dict[str, int]:
        """Return the MACs of each module: query, key, value, skip, and the head on the first rows.

        The attention along the edges is elementwise: products, sums, a scattered softmax.
        """
        macs = {}
        for i in range(self.layers):
            ins = self.width if i else self.features
            for name in ("lin_query", "lin_key", "lin_value"):
                macs[f"convs.{i}.{name}"] = self.nodes * ins * self.heads * self.width
            macs[f"convs.{i}.lin_skip"] = self.nodes * ins * self.width
            macs[f"convs.{i}"] = self.nodes * ins * (3 * self.heads * self.width + self.width)
        macs["convs"] = sum(macs[f"convs.{i}"] for i in range(self.layers))
        macs["post_mp"] = self.rows * self.width
        macs[""] = macs["convs"] + macs["post_mp"]
        return macs

    def params(self) -> int:
        """Return the parameters; one more layer and one more norm are built than run."""

        def conv(ins: int) -> int:
            return (ins + 1) * (3 * self.heads * self.width + self.width)

        norms = self.layers * 2 * self.width
        return conv(self.features) + self.layers * conv(self.width) + norms + self.width + 1


class GraphTransformer(nn.Module):
    """Layers of attention along the edges with norms between them, one number for each row."""

    def __init__(self, shape: GraphShape) -> None:
        super().__init__()
        from torch_geometric.nn import TransformerConv

        self.shape = shape
        ins = [shape.features] + [shape.width] * shape.layers
        self.convs = nn.ModuleList(
            TransformerConv(n, shape.width, heads=shape.heads, concat=False) for n in ins
        )
        self.lns = nn.ModuleList(nn.LayerNorm(shape.width) for _ in range(shape.layers))
        self.conv_dropout = nn.Dropout(0.0)
        self.post_mp = nn.Sequential(nn.Linear(shape.width, 1))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for i in range(self.shape.layers):
            x = self.conv_dropout(F.relu(self.convs[i](x, edges)))
            if i < self.shape.layers - 1:
                x = self.lns[i](x)
        out: torch.Tensor = self.post_mp(x[: self.shape.rows])
        return out

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features and edges, drawn with a fixed seed."""
        generator = torch.Generator().manual_seed(0)
        ends = torch.randint(self.shape.nodes, (2, self.shape.edges), generator=generator)
        return torch.ones(self.shape.nodes, self.shape.features), ends


FULL_SIZE = GraphShape(
    features=9, width=256, heads=32, layers=10, nodes=7170, edges=14340, rows=512
)

"""One large kernel of each family, to measure its peak rate, with its multiply-accumulates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from dispatch_flops.analysis.kernel_families import KernelFamily

Kernel = tuple[Callable[[], object], int]


def kernels_of(family: KernelFamily, device: torch.device, dtype: torch.dtype) -> Iterator[Kernel]:
    """Yield calls of kernels of the family, each with the MACs of one call.

    Sizes are eight times as large on an accelerator as on the CPU.
    """
    batch = 1 if device.type == "cpu" else 8

    numbers = torch.Generator().manual_seed(0)  # the program's random state stays as it is

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cpu", generator=numbers).to(device, dtype)

    match family:
        case "product":
            edge = 1024 * (batch if batch == 1 else 4)
            a, b = tensor(edge, edge), tensor(edge, edge)
            yield (lambda: torch.mm(a, b)), edge**3
            yield (lambda: F.linear(a, b)), edge**3
        case "convolution":
            n, channels, side = 4 * batch, 64, 56
            image, weight = tensor(n, channels, side, side), tensor(channels, channels, 3, 3)
            macs = n * channels * channels * 9 * side * side
            yield (lambda: F.conv2d(image, weight, padding=1)), macs
        case "attention":
            n, heads, length, width = 2 * batch, 8, 1024, 64
            q, k, v = (tensor(n, heads, length, width) for _ in range(3))
            macs = 2 * n * heads * length * length * width
            yield (lambda: F.scaled_dot_product_attention(q, k, v)), macs
        case "recurrent":
            steps, n, width = 64, 32 * batch, 256
            with torch.device("meta"):
                layer = nn.LSTM(width, width, dtype=dtype)
            layer.to_empty(device=device)
            for parameter in layer.parameters():
                parameter.data.copy_(tensor(*parameter.shape) / width)
            sequence = tensor(steps, n, width)
            macs = steps * n * 4 * 2 * width * width
            yield torch.no_grad()(lambda: layer(sequence)), macs

"""DTensor: the frame in which it runs an operator on fakes only to learn a shape."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.*"),
]

PROPAGATES = "_propagate_tensor_meta_non_cached"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


class Desugaring(TorchDispatchMode):
    """Hands operators on DTensors to them, and keeps the shapes of those that they run, by
    whether ``PROPAGATES`` is running.
    """

    def __init__(self, wrapper: type) -> None:
        super().__init__()
        self.wrapper = wrapper
        self.handed: Any = None
        self.runs: dict[bool, list[tuple[str, Any]]] = {True: [], False: []}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.wrapper in types:
            if self.handed is func:
                self.handed = None
                return NotImplemented
            self.handed = func
            with self:
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor):
            self.runs[in_propagation()].append((str(func), tuple(out.shape)))
        return out


def in_propagation() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == PROPAGATES:
            return True
        frame = frame.f_back
    return False


def test_sharding_propagator_runs_whole_shapes_in_propagate_tensor_meta_non_cached(
    mesh: Any,
) -> None:
    """dispatch_flops relies on this for not counting what DTensor runs on fakes of the whole tensor
    beside the rank's own share (counting/tensor_subclasses.py: ``in_sharding_propagation``).
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    a = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
    b = distribute_tensor(torch.ones(6, 10), mesh, [Replicate()])
    with Desugaring(DTensor) as mode:
        torch.mm(a, b)
    own = [shape for op, shape in mode.runs[False] if op == "aten.mm.default"]
    whole = [shape for op, shape in mode.runs[True] if op == "aten.mm.default"]
    assert own == [(2, 10)], (
        f"outside of a frame called {PROPAGATES} the mode must see the rank's own share alone: "
        f"{own}; within one it saw {whole}"
    )
    assert whole == [(8, 10)], (
        f"DTensor no longer learns shapes in a frame called {PROPAGATES}: it saw {whole} there"
    )

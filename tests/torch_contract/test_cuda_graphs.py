"""What CUDA graphs have without a GPU."""

from __future__ import annotations

import torch

from dispatch_flops import _torch


def test_replay_is_a_method_of_the_python_class() -> None:
    """dispatch_flops relies on this for knowing of replays (counting/launches.py: ``Launches``)."""
    own = torch.cuda.CUDAGraph.replay
    assert vars(torch.cuda.CUDAGraph)["replay"] is own
    _torch.graph_replays.follow(print)
    assert torch.cuda.CUDAGraph.replay is not own
    _torch.graph_replays.unfollow(print)
    assert vars(torch.cuda.CUDAGraph)["replay"] is own

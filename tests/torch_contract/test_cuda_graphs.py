"""What CUDA graphs, and AOTInductor's packages, have before one is made."""

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


def test_packages_are_called_by_a_method_of_their_class() -> None:
    """dispatch_flops relies on this for knowing that they ran (counting/launches.py: ``Launches``).

    What ``aoti_load_package`` returns is of this class.
    """
    from torch.export.pt2_archive._package import AOTICompiledModel

    runs = _torch.package_runs()
    own = vars(AOTICompiledModel)["__call__"]
    assert runs is not None
    runs.follow(print)
    assert AOTICompiledModel.__call__ is not own
    runs.unfollow(print)
    assert vars(AOTICompiledModel)["__call__"] is own

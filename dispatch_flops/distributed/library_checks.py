"""Checks of other libraries that would take a simulated program for one that is traced."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

_HOME, _CHECK = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def without_tracing_checks() -> Iterator[None]:
    """Let transformers run its models in the block as on real tensors.

    It takes fake tensors for those of a program that is exported, and then builds the mask of
    causal attention, which it leaves to the kernel in a run.
    Source: transformers 5.23, masking_utils.find_packed_sequence_indices.
    """
    module = sys.modules.get(_HOME)
    if not hasattr(module, _CHECK):
        yield
        return
    with mock.patch.object(module, _CHECK, lambda tensor: False):
        yield

"""Targets: from the text that names a model to the model and its inputs, ready to run.

Every mistake in a target, and every error of the user's own code, is a ``TargetError`` of one
line; the error of the user's code is its ``__cause__``. Importing a target adds its folder to
``sys.path``.
"""

from __future__ import annotations

from dispatch_flops.cli.targets.inputs import Inputs, parse_shape
from dispatch_flops.cli.targets.preparation import PreparedModel, prepare
from dispatch_flops.cli.targets.source import raise_target_error

__all__ = ["Inputs", "PreparedModel", "parse_shape", "prepare", "raise_target_error"]

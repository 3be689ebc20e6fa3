"""The package's own errors, and its warning.

Each message names what was wrong and what to do about it. Where Python has a word for it, its own
errors are raised: KeyError for a module that a profile does not hold, ImportError for an extra that
is not installed, ValueError for text that is no number.
"""

from __future__ import annotations


class DispatchFlopsError(Exception):
    """Base class: catch this to catch everything the package raises on purpose."""


class AlreadyActiveError(DispatchFlopsError):
    """A counter was entered a second time before it was left."""


class WrongThreadError(DispatchFlopsError):
    """A counter was to be left in another thread than the one that entered it."""


class DuplicateFormulaError(DispatchFlopsError):
    """An operator already has a formula and ``override=True`` was not given."""


class UnknownOperatorError(DispatchFlopsError):
    """A name or object does not denote an operator that can carry a formula."""


class UncountedOpsError(DispatchFlopsError):
    """``strict=True`` and at least one operator ran for which there is no cost."""


class UncountedWarning(UserWarning):
    """Operators ran whose cost is not known: every total that holds them is a lower bound."""


class FormulaError(DispatchFlopsError):
    """A formula gave something that is no cost. Never reaches the user's run: it is recorded."""


class NotProfiledError(DispatchFlopsError):
    """Numbers were asked for before anything was profiled."""


class ProfileFormatError(DispatchFlopsError):
    """A saved profile cannot be read: unknown schema, unknown version or damaged content."""


class InconsistentProfileError(DispatchFlopsError):
    """``Profile.check`` found a total that is not the sum of its parts."""


class TargetError(DispatchFlopsError):
    """A model, an input or a file that the user named cannot be used."""


class ConfigError(DispatchFlopsError):
    """A configuration has an unknown key, or an option a value that it cannot have."""

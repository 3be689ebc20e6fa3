"""Exceptions and the warning that the package defines.

A message names what is wrong and what to do. Where Python has a fitting exception, that one is
raised: KeyError for a module that is not in a profile, ImportError for an extra that is not
installed, ValueError for text that is not a number.
"""

from __future__ import annotations


class DispatchFlopsError(Exception):
    """Base class of all exceptions below."""


class AlreadyActiveError(DispatchFlopsError):
    """A counter was entered again before it was left."""


class WrongThreadError(DispatchFlopsError):
    """A counter was left, paused or stopped in another thread than the one that entered it."""


class DuplicateFormulaError(DispatchFlopsError):
    """The operator already has a formula, and ``override=True`` was not given."""


class UnknownOperatorError(DispatchFlopsError):
    """The name or object is not an operator that can have a formula."""


class UncountedOpsError(DispatchFlopsError):
    """An operator without a known cost ran under ``strict=True``."""


class UncountedWarning(UserWarning):
    """Operators without a known cost ran: totals that include them are lower bounds."""


class FormulaError(DispatchFlopsError):
    """A formula does not fit its operator: its parameters at registration, its result in a run.

    In a run the error is recorded; it never interrupts the program.
    """


class NotProfiledError(DispatchFlopsError):
    """Results were requested before anything was profiled, or outside a counter's block."""


class ProfileFormatError(DispatchFlopsError):
    """A saved profile cannot be read: unknown schema, unknown version or damaged content."""


class InconsistentProfileError(DispatchFlopsError):
    """``Profile.check`` found a value that contradicts others, such as a total and its parts."""


class TargetError(DispatchFlopsError):
    """A model, an input or a file that the user passed cannot be used."""


class OutputError(TargetError, OSError):
    """A file cannot be written. Arguments and attributes are those of the OSError."""

    def __str__(self) -> str:
        return f"output_file={self.filename!r}: {self.strerror}"


class OutputIsFolderError(OutputError, IsADirectoryError):
    """The output file is a folder."""


class ConfigError(DispatchFlopsError):
    """A configuration has an unknown key, or an option has a value that is not allowed."""

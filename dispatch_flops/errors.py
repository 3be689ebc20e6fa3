"""Exceptions and the warning that the package defines.

A message names what is wrong and what to do. Where Python has a fitting exception, that one is
raised: KeyError for a module that is not in a profile, ImportError for an extra that is not
installed, ValueError for text that is not a number.
"""

from __future__ import annotations

__all__ = [
    "AlreadyActiveError",
    "ConfigError",
    "DispatchFlopsError",
    "DuplicateFormulaError",
    "FormulaError",
    "InconsistentProfileError",
    "NotProfiledError",
    "OutputError",
    "OutputIsFolderError",
    "ProfileFormatError",
    "TargetError",
    "UncountedOpsError",
    "UncountedWarning",
    "UnknownOperatorError",
    "WrongPlaceError",
    "WrongThreadError",
]


class DispatchFlopsError(Exception):
    """Base class of all exceptions that the package defines.

    Example::

        try:
            Profile.from_json("{}")
        except DispatchFlopsError as error:  # ProfileFormatError is one
            print(error)
    """


class AlreadyActiveError(DispatchFlopsError):
    """A counter was entered again before it was left.

    Example::

        try:
            with counter, counter:  # two counters may nest; one is entered once
                model(x)
        except AlreadyActiveError as error:
            print(error)
    """


class WrongThreadError(DispatchFlopsError):
    """A counter was left, paused or stopped in another thread than the one that entered it.

    Example::

        from concurrent.futures import ThreadPoolExecutor

        counter.__enter__()
        with ThreadPoolExecutor() as pool:
            left = pool.submit(counter.__exit__, None, None, None)
        print(type(left.exception()).__name__)  # prints WrongThreadError
        counter.__exit__(None, None, None)
    """


class WrongPlaceError(DispatchFlopsError):
    """A counter was left or stopped where torch would turn it on again.

    That is inside an inference mode, a backward pass, a compiled call or an operator that began
    after the counter was entered.

    Example::

        counter.__enter__()
        try:
            with torch.inference_mode():
                counter.__exit__(None, None, None)
        except WrongPlaceError as error:
            print(error)
        counter.__exit__(None, None, None)
    """


class DuplicateFormulaError(DispatchFlopsError):
    """The operator already has a formula, and ``override=True`` was not given.

    Example::

        try:
            register_flops(torch.ops.aten.mm)(lambda a, b, *, out, **_: 0)
        except DuplicateFormulaError as error:  # ``overridden`` replaces a formula for one block
            print(error)
    """


class UnknownOperatorError(DispatchFlopsError):
    """The name or object is not an operator that can have a formula.

    Example::

        try:
            register_flops(torch.nn.functional.gelu)
        except UnknownOperatorError as error:
            print(error)  # names torch.ops.aten.gelu
    """


class UncountedOpsError(DispatchFlopsError):
    """An operator without a known cost ran under ``strict=True``.

    Example::

        @torch.library.custom_op("mylib::twice", mutates_args=())
        def twice(t: torch.Tensor) -> torch.Tensor:
            return 2 * t

        try:
            with FlopCounterMode(display=False, strict=True):
                twice(x)
        except UncountedOpsError as error:
            print(error)
    """


class UncountedWarning(UserWarning):
    """Operators without a known cost ran: totals that include them are lower bounds.

    Example::

        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("error", UncountedWarning)  # for a whole test suite
            with FlopCounterMode(model, display=False):
                model(x)
    """


class FormulaError(DispatchFlopsError):
    """A formula does not fit its operator: its parameters at registration, its result in a run.

    In a run the error is recorded; it never interrupts the program.

    Example::

        try:
            register_flops("mylib::scale_rows")(lambda weight: 0)
        except FormulaError as error:
            print(error)  # a formula takes the result as out=
    """


class NotProfiledError(DispatchFlopsError):
    """Results were requested before anything was profiled, or outside a counter's block.

    Example::

        fresh = FlopCounterMode(model, display=False)
        try:
            print(fresh.profile)
        except NotProfiledError as error:
            print(error)  # prints nothing is counted yet; run the model inside the block
    """


class ProfileFormatError(DispatchFlopsError):
    """A saved profile cannot be read: unknown schema, unknown version or damaged content.

    Example::

        text = profile.to_json()
        try:
            Profile.from_json(text[: len(text) // 2])  # an interrupted download
        except ProfileFormatError as error:
            print(error)
    """


class InconsistentProfileError(DispatchFlopsError):
    """``Profile.check`` found a value that contradicts others, such as a total and its parts.

    Example::

        import dataclasses

        root = dataclasses.replace(profile.root, own_params=profile.total_params + 1)
        try:
            dataclasses.replace(profile, root=root).check()
        except InconsistentProfileError as error:
            print(error)
    """


class TargetError(DispatchFlopsError):
    """A model, an input or a file that the user passed cannot be used.

    Example::

        try:
            profile_model(model, args=x)
        except TargetError as error:
            print(error)  # prints args is of type Tensor; pass a list of the inputs, such as [x]
    """


class OutputError(TargetError, OSError):
    """A file cannot be written. Arguments and attributes are those of the OSError.

    Example::

        try:
            get_model_profile(model, args=[x], output_file="/dev/null/profile.txt")
        except OutputError as error:
            print(error.strerror)  # prints its folder is a file
    """

    def __str__(self) -> str:
        return f"output_file={self.filename!r}: {self.strerror}"


class OutputIsFolderError(OutputError, IsADirectoryError):
    """The output file is a folder.

    Example::

        import tempfile

        try:
            get_model_profile(model, args=[x], output_file=tempfile.gettempdir())
        except OutputIsFolderError as error:
            print(error)
    """


class ConfigError(DispatchFlopsError):
    """A configuration has an unknown key, or an option has a value that is not allowed.

    Example::

        try:
            FlopCounterMode(model, causal="no")
        except ConfigError as error:
            print(error)  # prints causal='no': choose "full" or "half"
    """

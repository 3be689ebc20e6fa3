"""What a counter says of work that it did not count: in its warning, and in a note of the profile.

Totals that include such work are lower bounds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from dispatch_flops.counting.aggregation import RecordedCalls
from dispatch_flops.counting.launches import Launches
from dispatch_flops.counting.uncounted import unknown_costs_text
from dispatch_flops.errors import UncountedWarning
from dispatch_flops.operators.costing import SYMBOLIC
from dispatch_flops.operators.program_lines import stacklevel_of_program
from dispatch_flops.profile import Profile
from dispatch_flops.units import times_text


def warn_of_uncounted(
    calls: RecordedCalls, unseen_modules: Sequence[str], *sentences: str | None
) -> None:
    """Warn, at the program's own line, of everything that was not counted.

    unseen_modules: see ``Session``. sentences: on what else there is; None for what there is not.
    """
    found = [sentence for sentence in sentences if sentence is not None]
    if calls.uncounted_ops():
        found.append(describe_uncounted(calls))
    if unseen_modules:
        its = "its class" if len(unseen_modules) == 1 else "each class"
        found.append(
            f"{describe_unseen(unseen_modules)}. Register a formula for {its}, or wrap the kernel "
            "with torch.library.custom_op"
        )
    if found:
        warnings.warn(". ".join(found), UncountedWarning, stacklevel=stacklevel_of_program())


def describe_unseen(modules: Sequence[str]) -> str:
    """Return the sentence on modules that ran without a trace."""
    from dispatch_flops.renderers.text import first_names  # takes tabulate along

    holds, it = ("holds", "it") if len(modules) == 1 else ("hold", "them")
    return (
        f"{first_names(modules)} ran and {holds} parameters, but no operator that computes was "
        f"seen in {it}: kernels that bypass the dispatcher count as 0"
    )


def describe_launches(launches: Launches) -> Iterator[str]:
    """Yield a sentence on each kind of work that was launched outside of operators."""
    if launches.kernels:
        from dispatch_flops.renderers.text import first_names  # takes tabulate along

        kernels = "kernels" if len(launches.kernels) > 1 else "kernel"
        yield (
            f"the Triton {kernels} {first_names(launches.kernels)} ran outside of operators: that "
            "work counts as 0; wrap each launch in torch.library.triton_op or custom_op, and "
            "register a formula"
        )
    if launches.replays:
        yield (
            f"CUDA graphs were replayed {times_text(launches.replays)}, which runs no operators: "
            "that work counts as 0; count the program as it runs without graphs"
        )
    if launches.package_runs:
        yield (
            f"AOTInductor's packages ran {times_text(launches.package_runs)} without operators: "
            "that work counts as 0; count the model that was exported"
        )


def describe_uncounted(calls: RecordedCalls | Profile) -> str:
    """Return the sentence on operators without a formula and on formulas that failed."""
    uncounted, errors = calls.uncounted_ops(), calls.formula_errors()
    broken = [op for op in uncounted if _is_exception(errors.get(op, ""))]
    symbolic = [op for op in uncounted if errors.get(op) == SYMBOLIC]
    advice = []
    if symbolic:
        advice.append("Count the program as it runs, where it is not traced")
    if len(broken) + len(symbolic) < len(uncounted):
        advice.append("Give each a formula with dispatch_flops.register_flops")
    if broken:
        advice.append(f"Mend the formula of {', '.join(broken)}")
    return ". ".join((unknown_costs_text(uncounted, errors), *advice))


def _is_exception(error: str) -> bool:
    """Return True for ``"TypeError: ..."``, a formula's; other reasons begin with a sentence."""
    return error.partition(":")[0].isidentifier()

"""Assert what a model costs, against figures or against a stored baseline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dispatch_flops.analysis.diff import diff
from dispatch_flops.analysis.machines import is_finite
from dispatch_flops.errors import ProfileFormatError, TargetError
from dispatch_flops.profile import Profile
from dispatch_flops.profilers.model import profile_model
from dispatch_flops.renderers import diff_table

__all__ = ["assert_flops"]

FIGURES = ("macs", "flops", "bytes", "params")


def assert_flops(
    model: nn.Module,
    inputs: Any = (),
    *,
    macs: int | None = None,
    flops: int | None = None,
    bytes: int | None = None,
    params: int | None = None,
    rtol: float = 0,
    backward: bool = False,
    **options: Any,
) -> Profile:
    """Assert that a model's call costs what is expected, and return its profile.

        assert_flops(torch.nn.Linear(3, 5), [torch.ones(2, 3)], macs=2 * 3 * 5)

    model: the module to profile. inputs: a list of its positional inputs, a dict of named ones, or
        a tensor.
    macs, flops, bytes, params: the expected figures of everything that ran; None (the default)
        checks nothing.
    rtol: the relative difference allowed, such as 0.01; 0 (the default) allows none.
    backward, options: see ``profile_model``.

    Raises AssertionError naming every figure that differs, with the profile's printout. Raises
    TargetError if no figure is given, or a value is not a finite number, and UncountedOpsError if
    an operator has no known cost.
    """
    expected = {"macs": macs, "flops": flops, "bytes": bytes, "params": params}
    given = {name: value for name, value in expected.items() if value is not None}
    if not given:
        raise TargetError(f"nothing to assert; pass one of {', '.join(FIGURES)}")
    for name, value in given.items():
        if not is_finite(value):
            raise TargetError(f"{name}={value!r:.60}: pass the number that is expected")
    _check_tolerance(rtol)
    profile = profile_of(model, inputs, backward=backward, **options)
    wrong = list(differences(figures_of(profile), given, rtol))
    if wrong:
        raise AssertionError("\n".join([*wrong, "", str(profile)]))
    return profile


def assert_as_baseline(profile: Profile, path: Path, *, rtol: float, update: bool) -> None:
    """Assert that a profile costs what the one saved as ``path`` does.

    update: write the profile to ``path`` instead, with its folder.

    Raises AssertionError with a diff by module, or naming what to do if there is no such file.
    Raises TargetError for an ``rtol`` that is not a number of 0 or more.
    """
    _check_tolerance(rtol)
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(profile.to_json(indent=1) + "\n", encoding="utf-8")
        return
    if not path.exists():
        raise AssertionError(f"there is no baseline {path}; run pytest --update-flops to write it")
    try:
        baseline = Profile.from_json(path.read_text(encoding="utf-8"))
    except ProfileFormatError as error:
        raise ProfileFormatError(f"{path}: {error}") from None
    wrong = list(differences(figures_of(profile), figures_of(baseline), rtol))
    if wrong:
        raise AssertionError(
            "\n".join(
                [
                    f"the cost differs from the baseline {path}:",
                    *wrong,
                    "",
                    diff_table.render(diff(baseline, profile), has_latency=False),
                    "",
                    "If that is intended, run pytest --update-flops and commit the file.",
                ]
            )
        )


def _check_tolerance(rtol: object) -> None:
    if not is_finite(rtol) or rtol < 0:
        raise TargetError(
            f"rtol={rtol!r:.60}: pass a relative difference of 0 or more, such as 0.01"
        )


def profile_of(model: nn.Module, inputs: Any, **options: Any) -> Profile:
    """Return the strict profile of one call."""
    if isinstance(inputs, Mapping):
        return profile_model(model, kwargs=inputs, warm_up=0, strict=True, **options)
    args = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
    return profile_model(model, args=args, warm_up=0, strict=True, **options)


def figures_of(profile: Profile) -> dict[str, int]:
    """Return the figures that are compared; latencies never repeat exactly."""
    total = profile.total()
    figures = (total.macs, total.flops, total.bytes_total, profile.total_params)
    return dict(zip(FIGURES, figures, strict=True))


def differences(found: Mapping[str, int], expected: Mapping[str, int], rtol: float) -> list[str]:
    """Return a line for each figure that differs by more than ``rtol`` of what is expected."""
    return [
        f"{name}: {found[name]:,}, expected {value:,}{_factor(found[name], value)}"
        for name, value in expected.items()
        if abs(found[name] - value) > (rtol * abs(value) if rtol else 0)  # exact, unlike isclose
    ]


def _factor(found: int, expected: int) -> str:
    return f" ({found / expected:.4g} x)" if expected else ""

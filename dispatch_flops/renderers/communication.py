"""Tables of what a rank sends and receives, plain or Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from dispatch_flops.analysis.communication import by_kind_and_group
from dispatch_flops.profile import CommCost, Profile
from dispatch_flops.renderers.text import Style, alignment, code, one_line, table
from dispatch_flops.renderers.view import View
from dispatch_flops.units import bytes_text

__all__ = ["render"]

NOTHING = "No communication was recorded."
_NUMBERS = ("Calls", "Payload", "On the bus")


def render(profile: Profile, view: View | None = None) -> str:
    """Return a row for each module, phase, kind and group, then sums by kind and group.

    The payload is the size that nccl-tests gives a collective; what is on the bus is what each
    rank sends of it.

    view: ``phase`` and ``style``.

        print(communication.render(profile, View(phase="backward")))
    """
    view = view or View()
    if not profile.communication:
        return NOTHING
    run = profile.run
    place = f"Rank {run.rank}" + (f" of {run.world_size}" if run.world_size else "")
    coordinates = "".join(f", {one_line(dim)} {at}" for dim, at in run.coordinates.items())
    parts = [f"{place}{coordinates}", _rows(profile, view)]
    if view.phase is None:
        parts.append(_sums(profile, view.style))
    return "\n\n".join(parts)


def communication_text(profile: Profile) -> str:
    """Return the sums by kind and group on one line; "" for a run that sent nothing."""
    return ", ".join(
        f"{kind} over {group_text(group.label, group.size)} {bytes_text(cost.payload_bytes)}"
        for (kind, group), cost in by_kind_and_group(profile).items()
        if cost.payload_bytes
    )


def group_text(label: str, size: int) -> str:
    """Return the mesh dimension or the name of a group, with its size: "dp (64 ranks)"."""
    return f"{one_line(label)} ({size} rank{'s' if size > 1 else ''})"


def _rows(profile: Profile, view: View) -> str:
    header = ["Module", "Phase", "Kind", "Group", "Dtype", *_NUMBERS]
    rows = [
        [
            code(total.fqn or profile.root.class_name, view.style),
            total.phase,
            total.kind,
            group_text(total.group.label, total.group.size),
            total.dtype or "",
            *_numbers(total.cost),
        ]
        for total in profile.communication
        if view.phase in (None, total.phase)
    ]
    return table(header, rows, alignment(len(header), left=5), view.style)


def _sums(profile: Profile, style: Style) -> str:
    rows = [
        [kind, group_text(group.label, group.size), *_numbers(cost)]
        for (kind, group), cost in by_kind_and_group(profile).items()
    ]
    whole = sum((total.cost for total in profile.communication), start=CommCost())
    rows.append(["all", "", *_numbers(whole)])
    header = ["Kind", "Group", *_NUMBERS]
    return table(header, rows, alignment(len(header), left=2), style)


def _numbers(cost: CommCost) -> Iterator[str]:
    yield str(cost.calls)
    yield bytes_text(cost.payload_bytes)
    yield bytes_text(cost.bus_bytes)

"""Tables of memory, plain or Markdown: each module, and what the peak consists of."""

from __future__ import annotations

from dispatch_flops.analysis.figures import walk_with_depth
from dispatch_flops.profile import MemoryProfile, PeakMoment, Profile
from dispatch_flops.profile.cost import Phase, in_order
from dispatch_flops.renderers.text import alignment, at_least, code, one_line, table
from dispatch_flops.renderers.view import View
from dispatch_flops.units import bytes_text, percent_text

__all__ = ["render"]

_NOTHING = "Memory was not followed: profile with memory=True, or --memory."
HELD_LABELS = {
    "parameters": "Parameters",
    "gradients": "Gradients",
    "optimizer_state": "Optimizer",
    "buffers": "Buffers",
    "activations": "Activations",
    "kv_cache": "KV cache",
}
_OPTIONAL = ("kv_cache",)  # columns that are shown where a module holds some


def render(profile: Profile, view: View | None = None) -> str:
    """Return the peak, what it consists of, and what each module holds and keeps for backward.

    Columns of bytes that a module holds include those of the modules below. The last columns are
    the most that was allocated, by any module, while the module ran.

    view: ``depth``, ``phase`` (whose peak is shown; None for the highest) and ``style``.

        print(memory_table.render(profile, View(depth=2)))
    """
    view = view or View()
    if profile.memory is None:
        return _NOTHING
    parts = [_peak_line(profile, profile.memory, view.phase)]
    peak = profile.memory.peak(view.phase)
    if peak is not None:
        parts.append(_uses(profile, profile.memory, view))
    parts.append(_modules(profile, profile.memory, view))
    if profile.memory.decomposed:
        parts.append(
            "These ran on the meta device by other operators than a device's kernels: "
            + ", ".join(map(one_line, profile.memory.decomposed))
        )
    if profile.memory.unseen:
        parts.append(
            "What these kernels allocate for themselves is not known: "
            + ", ".join(map(one_line, profile.memory.unseen))
        )
    return "\n\n".join(parts)


def memory_text(profile: Profile) -> str:
    """Return the peak, where it is and its roles on one line; "" where memory was not followed."""
    memory = profile.memory
    if memory is None or memory.peak_at is None:
        return ""
    roles = ", ".join(f"{role} {bytes_text(count)}" for role, count in memory.by_role().items())
    return f"{_peak_text(profile, memory, None)}: {roles}"


def marked_bytes(count: int, memory: MemoryProfile) -> str:
    """Return bytes of this memory, marked with ``>=`` or ``~`` if they are not exact."""
    if memory.is_approximate:
        return f"~ {bytes_text(count)}"
    return at_least(bytes_text(count), memory.is_lower_bound)


def _peak_line(profile: Profile, memory: MemoryProfile, phase: Phase | None) -> str:
    if memory.peak(phase) is None:
        return "Nothing was allocated."
    others = [
        f"{one_line(device.device)} {marked_bytes(device.peak_bytes, memory)}"
        for device in memory.devices[1:]
    ]
    also = f"; also {', '.join(others)}" if others else ""
    return (
        f"Peak {_peak_text(profile, memory, phase)}, on {one_line(memory.devices[0].device)}{also}"
    )


def _peak_text(profile: Profile, memory: MemoryProfile, phase: Phase | None) -> str:
    peak = memory.peak(phase)
    assert peak is not None
    size = marked_bytes(peak.peak_bytes, memory)
    return f"{size} at {_moment_text(profile, peak.peak_at)}"


def _moment_text(profile: Profile, moment: PeakMoment) -> str:
    operator = f" ({one_line(moment.operator)})" if moment.operator else ""
    return f"{one_line(moment.fqn or profile.root.class_name)} in {moment.phase}{operator}"


def _uses(profile: Profile, memory: MemoryProfile, view: View) -> str:
    peak = memory.peak(view.phase)
    assert peak is not None
    rows = [
        [
            use.role,
            "" if use.fqn is None else code(use.fqn or profile.root.class_name, view.style),
            use.phase or "before",
            bytes_text(use.bytes),
            percent_text(use.bytes, peak.peak_bytes),
        ]
        for use in peak.uses
    ]
    header = ["Role", "Module", "Allocated in", "Bytes", "% Peak"]
    return table(header, rows, alignment(len(header), left=3), view.style)


def _modules(profile: Profile, memory: MemoryProfile, view: View) -> str:
    trees = (profile.root, profile.outside)
    phases = in_order(
        phase
        for tree in trees
        if tree.memory is not None
        for phase in tree.memory.peak_bytes
        if view.phase in (None, phase)
    )
    held = held_names(profile)
    rows = []
    for tree in trees:
        for node, level in walk_with_depth(tree):
            if node.memory is not None and (view.depth is None or level <= view.depth):
                pad = " " * level if view.style == "plain" else ""
                label = code(node.fqn or tree.class_name, view.style)
                peaks = (node.memory.peak_bytes.get(phase) for phase in phases)
                rows.append(
                    [
                        pad + label,
                        *(bytes_text(getattr(node.memory.total, name)) for name in held),
                        *("" if peak is None else marked_bytes(peak, memory) for peak in peaks),
                    ]
                )
    header = [
        "Module",
        *(HELD_LABELS[name] for name in held),
        *(f"Peak {phase}" for phase in phases),
    ]
    return table(header, rows, alignment(len(header)), view.style)


def held_names(profile: Profile) -> tuple[str, ...]:
    """Return what the columns of bytes held are of; a KV cache only where a module holds some."""
    totals = [node.memory.total for node in profile.nodes() if node.memory is not None]
    return tuple(
        name
        for name in HELD_LABELS
        if name not in _OPTIONAL or any(getattr(total, name) for total in totals)
    )

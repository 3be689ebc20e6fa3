"""Communication of modules with all below them, and of groups by kind."""

from __future__ import annotations

from dispatch_flops.profile import CommCost, CommGroup, Profile


def inclusive_communication(profile: Profile) -> dict[str, CommCost]:
    """Return ``{fqn: calls and bytes of it and all below}`` of the modules that communicate."""
    own = profile.comm_by("module")
    sums: dict[str, CommCost] = {}
    for root in (profile.root, profile.outside) if own else ():
        for node in reversed(list(root.walk())):
            parts = [own.get(node.fqn), *(sums.get(child.fqn) for child in node.children)]
            known = [part for part in parts if part is not None]
            if known:
                sums[node.fqn] = sum(known, start=CommCost())
    return sums


def by_kind_and_group(profile: Profile) -> dict[tuple[str, CommGroup], CommCost]:
    """Return ``{(kind, group): calls and bytes}``, most payload first."""
    sums: dict[tuple[str, CommGroup], CommCost] = {}
    for total in profile.communication:
        key = (total.kind, total.group)
        sums[key] = sums.get(key, CommCost()) + total.cost
    return dict(sorted(sums.items(), key=lambda item: -item[1].payload_bytes))

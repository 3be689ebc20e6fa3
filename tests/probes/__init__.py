"""One-operator probes: small calls that FLOP counters are known to get wrong.

Sizes are unequal, and coprime where the operator allows it: a mistaken dimension changes the count.
"""

from __future__ import annotations

from tests.probes import attention, convolutions, gradients, products, recurrent, special
from tests.probes.probe import Probe as Probe

GROUPS: dict[str, tuple[Probe, ...]] = {
    "Products": products.PROBES,
    "Other forms of product": special.PROBES,
    "Convolutions": convolutions.PROBES,
    "Attention": attention.PROBES,
    "Recurrent layers": recurrent.PROBES,
    "Backward": gradients.PROBES,
}

PROBES = tuple(probe for probes in GROUPS.values() for probe in probes if probe.needs())

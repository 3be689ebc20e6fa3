"""Self-contained HTML page that loads nothing from the network.

Names are data, never markup. They are embedded as compressed JSON, and the page's script inserts
them as text. The page's content security policy allows only its own script, by
its hash, and blocks every request.
"""

from __future__ import annotations

from dispatch_flops.analysis.efficiency import machine_of
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.explanations import counting
from dispatch_flops.renderers.html.document import document
from dispatch_flops.renderers.html.payload import payload
from dispatch_flops.renderers.text import one_line
from dispatch_flops.renderers.view import View

__all__ = ["render"]

_SCRIPTS = (
    "tree.js",
    "table.js",
    "tree_table.js",
    "chart.js",
    "roofline.js",
    "memory.js",
    "timeline.js",
    "report.js",
)


def render(profile: Profile, view: View | None = None) -> str:
    """Return the text of the HTML file: about 85 KB, and some 20 bytes per module.

    view: ``machine`` (for MFU and roofline) and ``title``.

    Example::

        view = View(machine=MACHINES["NVIDIA H200"], title="before the change")
        page = html.render(profile, view)
        Path("report.html").write_text(page)
    """
    view = view or View()
    heading = one_line(view.title or profile.root.class_name) or "Profile"
    return document(
        title=heading,
        kind="profile",
        body="report.html",
        scripts=_SCRIPTS,
        data=payload(profile, machine_of(profile, view.machine), heading),
        texts={"counting": counting(profile.run.flops)},
    )

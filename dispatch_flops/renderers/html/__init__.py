"""Self-contained HTML page that loads nothing from the network.

Names are data, never markup. They are embedded as JSON in which ``<`` is escaped, and the page's
script inserts them as text. The page's content security policy allows only its own scripts, by
their hashes, and blocks every request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
from typing import Any

from dispatch_flops.analysis.efficiency import machine_of
from dispatch_flops.profile import Profile
from dispatch_flops.renderers._extras import require
from dispatch_flops.renderers.explanations import counting
from dispatch_flops.renderers.html.payload import payload
from dispatch_flops.renderers.text import one_line
from dispatch_flops.renderers.view import View

_SCRIPTS = ("format.js", "table.js", "chart.js", "roofline.js", "page.js")
_SLOT = re.compile(r"@@(\w+)@@")


def render(profile: Profile, view: View | None = None) -> str:
    """Return the text of the HTML file: about 5 MB, most of it plotly.js.

    view: ``machine`` (for MFU and roofline) and ``title``.

    Raises ImportError where plotly is not installed.
    """
    view = view or View()
    plotly = _plotly_js()
    heading = one_line(view.title or profile.root.class_name) or "Profile"
    data = payload(profile, machine_of(profile, view.machine), heading)
    script = "\n".join(('"use strict";', "{", *(_resource(name) for name in _SCRIPTS), "}"))
    parts = {
        "title": html.escape(heading),
        "policy": _policy(plotly, script),
        "style": _resource("style.css"),
        "counting": html.escape(counting(profile.run.flops)),
        "data": embedded(data),
        "plotly": plotly,
        "script": script,
    }
    # A single pass: what is inserted is not searched for slots.
    return _SLOT.sub(lambda slot: parts[slot[1]], _resource("page.html"))


def embedded(data: Any) -> str:
    """Return JSON that cannot end its script element: ASCII without ``<``."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _policy(*scripts: str) -> str:
    """Return the policy that allows scripts with these hashes, inline styles and inline images."""
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _plotly_js() -> str:
    plotly = require("plotly.offline", extra="report", purpose="the HTML report")
    # Browsers normalise line endings to a line feed before they hash a script.
    source = str(plotly.get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _resource(name: str) -> str:
    return importlib.resources.files(__name__).joinpath(name).read_text("utf-8")

"""The report: one HTML file that holds all it needs and asks nothing of any network.

Names are data, never markup. They travel as JSON in which ``<`` is escaped, and the page's
script puts them in place as text. The page's own policy lets only its own scripts run, known by
their hashes, and lets no request leave it.
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
from dispatch_flops.analysis.machines import Machine
from dispatch_flops.profile import Profile
from dispatch_flops.renderers.html.payload import payload
from dispatch_flops.renderers.text import one_line

_SCRIPTS = ("format.js", "table.js", "chart.js", "roofline.js", "page.js")
_SLOT = re.compile(r"@@(\w+)@@")


def render(profile: Profile, *, machine: Machine | None = None, title: str | None = None) -> str:
    """The report as the text of an HTML file, about 5 MB of which plotly.js is the most.

    machine: whose peaks MFU and roofline are held against; by default the device of the
        profile, where it is known.
    title: by default the model's class.

    Raises ImportError where plotly is not installed.
    """
    plotly = _plotly_js()
    heading = one_line(title or profile.root.class_name) or "Profile"
    data = payload(profile, machine_of(profile, machine), heading)
    script = "\n".join(('"use strict";', "{", *(_resource(name) for name in _SCRIPTS), "}"))
    parts = {
        "title": html.escape(heading),
        "policy": _policy(plotly, script),
        "style": _resource("style.css"),
        "data": embedded(data),
        "plotly": plotly,
        "script": script,
    }
    # One pass over the page alone: nothing that is put in is looked at for slots again.
    return _SLOT.sub(lambda slot: parts[slot[1]], _resource("page.html"))


def embedded(data: Any) -> str:
    """JSON that nothing can end early: no ``<`` in it, and ASCII alone."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _policy(*scripts: str) -> str:
    """What the browser may load: the scripts with these hashes, styles and pictures inline."""
    hashes = " ".join(f"'sha256-{_sha256(script)}'" for script in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            "the HTML report needs plotly: pip install 'dispatch-flops[report]'", name="plotly"
        ) from error
    # Browsers read each line end as one line feed before they hash a script.
    source = str(get_plotlyjs()).replace("\r\n", "\n").replace("\r", "\n")
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _resource(name: str) -> str:
    return importlib.resources.files(__name__).joinpath(name).read_text("utf-8")

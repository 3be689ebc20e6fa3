"""Frame of every page: one style sheet, one policy, and the data with the script that shows it.

A page has a body (an HTML resource of this folder) and scripts (resources, too). The scripts of
all pages share one scope with ``format.js`` and ``common.js``, which unpack ``data``.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

_FIRST_SCRIPTS = ("format.js", "common.js")
_SLOT = re.compile(r"@@(\w+)@@")


def document(
    *,
    title: str,
    kind: str,
    body: str,
    scripts: Sequence[str],
    data: Mapping[str, Any],
    texts: Mapping[str, str] | None = None,
) -> str:
    """Return the text of a self-contained page.

    title: of the window. kind: what the page is of, as "profile". body, scripts: names of
    resources. data: values that JSON represents exactly, with a "title". texts: what the body's
    slots hold, ``{slot: text}``.

        document(title="Net", kind="profile", body="report.html", scripts=["report.js"], data=data)
    """
    script = _script([*_FIRST_SCRIPTS, *scripts])
    escaped = {name: html.escape(text) for name, text in (texts or {}).items()}
    parts = {
        "title": html.escape(title),
        "kind": html.escape(kind),
        "policy": _policy(script),
        "style": _resource("style.css"),
        "body": _filled(_resource(body), escaped),
        "data": embedded(data),
        "script": script,
    }
    return _filled(_resource("page.html"), parts)


def embedded(data: Any) -> str:
    """Return JSON, compressed with zlib, in base64: text that cannot end its script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _filled(text: str, parts: Mapping[str, str]) -> str:
    """Return the text with its slots filled, in a single pass: what is inserted has no slots."""
    return _SLOT.sub(lambda slot: parts[slot[1]], text)


def _script(names: Sequence[str]) -> str:
    return "\n".join(('"use strict";', "(async () => {", *map(_resource, names), "})();"))


def _policy(script: str) -> str:
    """Return the policy that allows this script, inline styles and inline images."""
    return (
        f"default-src 'none'; script-src 'sha256-{_sha256(script)}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _resource(name: str) -> str:
    folder = importlib.resources.files("dispatch_flops.renderers.html")
    return folder.joinpath(name).read_text("utf-8")

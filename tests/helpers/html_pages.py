"""What a page of ``renderers.html`` holds."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any


def page_data(page: str) -> Any:
    """Return the data that the page's script shows."""
    packed = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    assert packed is not None
    return unpacked(packed[1])


def unpacked(text: str) -> Any:
    """Return the data of which ``html.document.embedded`` made the text."""
    return json.loads(zlib.decompress(base64.b64decode(text)))

"""Self-contained HTML file: data as a JSON block, with the scripts and styles of ``template/``."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_PLOTS = "uplot/uPlot.iife.min.js"
_STYLES = ("uplot/uPlot.min.css", "template/page.css")


def html_page(title: str, payload: dict[str, Any], scripts: Sequence[str]) -> str:
    """Return a page that shows ``payload`` with ``scripts`` of ``template/``."""
    files = (_PLOTS, *(f"template/{name}.js" for name in scripts))
    script = "\n".join(['"use strict";', *((_HERE / name).read_text(encoding="utf-8") for name in files)])
    fillings = {
        "title": html.escape(title),
        # Only this script may run and nothing may be fetched, even if a run's name contains code.
        "script-hash": base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode(),
        "licence": (_HERE / "uplot" / "LICENSE").read_text(encoding="utf-8"),
        "style": "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _STYLES),
        "data": _for_html(payload),
        "script": f"\n{script}\n",
    }
    template = (_HERE / "template" / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([a-z-]+)\}\}", lambda match: fillings[match[1]], template)


def _for_html(payload: dict[str, Any]) -> str:
    """Return JSON in which no string can end the ``<script>``."""
    text = json.dumps(payload, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")

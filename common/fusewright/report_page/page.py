"""The page: a document as data in a self-contained HTML file, without network access or libraries."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from importlib import resources
from typing import Any

_ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that could end the element that holds the data, or a line of script."""

_CLOSED = "base-uri 'none'; form-action 'none'"


def render(document: dict[str, Any]) -> str:
    """Render a document. All its texts (module names, source) are handled as data: the script inserts them as text, and the
    page's content policy allows no other script."""
    style, script = _part("page.css"), _part("page.js")
    filled = {
        "{{policy}}": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; {_CLOSED}",
        "{{title}}": html.escape(f"{document['model']}, {document['backend']}"),
        "{{style}}": style,
        "{{script}}": script,
        "{{data}}": as_text(document),
    }
    head, _, rest = _part("page.html").partition("{{policy}}")
    text = head + filled["{{policy}}"]
    for name in ("{{title}}", "{{style}}", "{{data}}", "{{script}}"):
        before, _, rest = rest.partition(name)
        text += before + filled[name]
    return text + rest


def as_text(document: dict[str, Any]) -> str:
    """JSON that is safe inside a script element."""
    text = json.dumps(_finite(document), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character, escaped in _ESCAPED.items():
        text = text.replace(character, escaped)
    return text


def _finite(x: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks."""
    if isinstance(x, float):
        return float(f"{x:.5g}") if math.isfinite(x) else None
    if isinstance(x, dict):
        return {str(k): _finite(v) for k, v in x.items()}
    return [_finite(v) for v in x] if isinstance(x, list | tuple) else x


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"

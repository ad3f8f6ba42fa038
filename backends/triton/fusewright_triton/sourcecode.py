"""Emitted source as a Python module, without a file: Triton reads the text of functions back through linecache."""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping
from types import ModuleType
from typing import Any


def load(text: str, names: Mapping[str, Any]) -> ModuleType:
    """Runs the definitions in `text` with `names` in place of what its import lines would bring."""
    body = "\n".join(("" if line.startswith(("import ", "from ")) else line) for line in text.splitlines())
    filename = f"<fusewright {hashlib.sha256(body.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(body), None, [f"{line}\n" for line in body.splitlines()], filename)
    module = ModuleType("fusewright_triton_kernel")
    module.__dict__.update(names)
    exec(compile(body, filename, "exec"), module.__dict__)
    return module

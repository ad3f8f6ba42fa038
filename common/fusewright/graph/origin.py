"""Where a graph comes from, in a few words for display."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator

from torch.fx import Graph

_FRAME = re.compile(r'File "(.+)", line (\d+), in (.+)')
_CLASS = re.compile(r"\s*class\s+(\w+)")


def origin(graph: Graph) -> str:
    """The compiled function, or the class of the module, and its location: "Bert modeling.py:41"; "" if unknown."""
    return compiled_at(first_trace(graph))


def first_trace(graph: Graph) -> str:
    """The stack trace of the first node that has one; "" if none has."""
    return next((t for n in graph.nodes if (t := n.meta.get("stack_trace"))), "")


def compiled_at(trace: str) -> str:
    """The `origin` of a node with this stack trace."""
    found = list(frames(trace))
    if not found:
        return ""
    # decorators may wrap a module's forward
    path, line, function = next((f for f in found if f[2] == "forward"), found[0])
    name = _class_around(path, line) or function if function == "forward" else function
    return f"{name} {path.replace(chr(92), '/').rsplit('/', 1)[-1]}:{line}"


def frames(trace: str) -> Iterator[tuple[str, int, str]]:
    """Path, line and function of each entry of a stack trace, the outermost first."""
    for line in trace.splitlines():
        found = _FRAME.match(line.strip())
        if found:
            yield found[1], int(found[2]), found[3]


def _class_around(path: str, line: int) -> str:
    """The class whose body contains a line, found by indentation; "" outside any class or without source."""
    lines = linecache.getlines(path)[:line]
    depth = _indent(lines[-1]) if lines else 0
    for text in reversed(lines):
        if text.strip() and _indent(text) < depth and not text.strip().startswith(("#", ")", "]", "}")):
            depth = _indent(text)
            if found := _CLASS.match(text):
                return found[1]
    return ""


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())

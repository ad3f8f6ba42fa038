"""Reads the output of `printer`: `to_text(parse(text)) == text`. Tests may also write such texts by hand.

%0: f32[2,s0] = input('x')
%1: f32[2,s0] = relu(%0)  # model.py:41
return [%1]
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.errors import FusewrightError, nearest
from fusewright.graph.printer import SHORT
from fusewright.graph.spec import contiguous_strides
from fusewright.interface import HOST


class ParseError(FusewrightError, ValueError):
    """A text that is not a graph. The message starts with the line number."""


_DTYPES = {short: dtype for dtype, short in SHORT.items()}
_PYTHON = {
    n: f for module in (math, operator) for n, f in vars(module).items() if callable(f) and not n.startswith("_")
}
_SCALARS: dict[str, Any] = {"int": 0, "float": 0.0, "bool": False, "str": "", "none": None}
_WORDS: dict[str, Any] = {"None": None, "True": True, "False": False, "inf": math.inf, "nan": math.nan}
_DEVICE = re.compile(r"[a-z]+(:\d+)?$")
_TOKEN = re.compile(
    r"""\s*(?:
      (?P<ref>%\d+)
    | (?P<complex>\([^()'"]*j\)|-?[\d.]+(?:e[+-]?\d+)?j)
    | (?P<number>-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf|nan)(?![\w.]))
    | (?P<string>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
    | (?P<name>[A-Za-z_][\w.]*(?::\d+)?)
    | (?P<mark>[][(),=])
    )""",
    re.VERBOSE,
)
_LINE = re.compile(r"%(?P<number>\d+):\s*(?P<rest>.*)")


def parse(text: str) -> Graph:
    """Parse a printed graph, with FakeTensors and SymInts in `meta["val"]`. Raises `ParseError`.

    Symbols get arbitrary hints, since the text has none. Attributes get no value.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            reader.line(line.strip())
        except ParseError:
            raise
        except (ValueError, TypeError, LookupError) as e:
            raise ParseError(f"line {number}: {e.args[0] if e.args else e}") from e
    if not reader.returned:
        raise ParseError(f"line {len(text.splitlines())}: the graph does not return")
    return reader.graph


class _Reader:
    def __init__(self) -> None:
        self.graph = Graph()
        self.nodes: dict[str, Node] = {}
        self.symbols = compat.Symbols()
        self.mode = compat.fake_mode(self.symbols.env)
        self.returned = False

    def line(self, line: str) -> None:
        if self.returned:
            raise ValueError("something follows the return")
        if line.startswith("return"):
            tokens = _Tokens(line.removeprefix("return"), self._ref)
            self.graph.output(tokens.whole())
            self.returned = True
            return
        found = _LINE.match(line)
        if found is None:
            raise ValueError("expected '%N: type = op(...)' or 'return ...'")
        label = f"%{found['number']}"
        if label in self.nodes:
            raise ValueError(f"{label} is defined twice")
        kind, rest = _until(found["rest"], "=")
        call, comment = _comment(rest)
        val = self.type(kind.strip())
        name, args, kwargs = _Tokens(call, self._ref).call()
        node = self._node(name, args, kwargs)
        node.meta["val"] = val
        if comment:
            path, _, at = comment.rpartition(":")
            node.meta["stack_trace"] = f'  File "{path}", line {at}, in forward'
        self.nodes[label] = node

    def _ref(self, label: str) -> Node:
        if label not in self.nodes:
            raise ValueError(f"{label} is used before it is defined")
        return self.nodes[label]

    def _node(self, name: str, args: list[Any], kwargs: dict[str, Any]) -> Node:
        if name == "input":
            return self.graph.create_node("placeholder", args[0])
        if name == "attribute":
            return self.graph.create_node("get_attr", args[0])
        return self.graph.create_node("call_function", _function(name), tuple(args), kwargs)

    def type(self, text: str) -> Any:
        """The traced value described by a type."""
        if text.startswith("("):
            return tuple(self.type(t) for t in _split(text[1:-1]))
        if text.startswith("sym("):
            return self.symbols.size(text[4:-1])
        if "[" not in text:
            if text in _SCALARS:
                return _SCALARS[text]
            raise ValueError(f"type {text!r} cannot be read back")
        text, _, device = text.partition("@")
        text, _, unread = text.partition("~")
        dtype, rest = _until(text, "[")
        shape, rest = _until(rest, "]")
        sizes = [self.symbols.size(s) for s in _split(shape)]
        strides = [self.symbols.size(s) for s in _split(rest[1:-1])] if rest else contiguous_strides(sizes)
        if len(strides) != len(sizes):
            raise ValueError(f"{text} has {len(sizes)} sizes but {len(strides)} strides")
        fake = compat.fake_tensor(self.mode, sizes, strides, _dtype(dtype), device or HOST)
        return compat.lazy_view(fake, unread) if unread else fake


def _dtype(name: str) -> torch.dtype:
    found = _DTYPES.get(name, getattr(torch, name, None))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}; {nearest(name, _DTYPES)}")
    return found


def _function(name: str) -> Callable[..., Any]:
    """The target of a printed name: a row of the opset, an opaque operator, or a Python function."""
    if name in ops.OPS:
        target: Callable[..., Any] = ops.OPS[name].target
        return target
    first, _, rest = name.partition(".")
    if first == "py":
        if rest not in _PYTHON:
            raise ValueError(f"the Python function {rest!r} cannot be read back")
        python: Callable[..., Any] = _PYTHON[rest]
        return python
    base, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, first), base, None) if base else None
    found: Callable[..., Any] | None = getattr(packet, overload or "default", None)
    if found is None:
        raise ValueError(f"there is no op {name!r}; {nearest(name, ops.OPS)}")
    return found


def _until(text: str, mark: str) -> tuple[str, str]:
    """Split `text` at the first `mark` outside brackets."""
    depth = 0
    for i, c in enumerate(text):
        if depth == 0 and c == mark:
            return text[:i], text[i + 1 :].strip()
        depth += (c in "([{") - (c in ")]}")
    raise ValueError(f"expected {mark!r} in {text!r}")


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts if p.strip()]


def _comment(text: str) -> tuple[str, str]:
    """Split a line into the call and the source-line comment. Only the last ')' can end the call."""
    end = text.rfind(")")
    head, tail = text[: end + 1], text[end + 1 :].strip()
    if tail and not tail.startswith("#"):
        raise ValueError(f"cannot read {tail!r} after the call")
    return head, tail.removeprefix("#").strip()


class _Tokens:
    """The arguments of one line, read from left to right."""

    def __init__(self, text: str, ref: Callable[[str], Node]) -> None:
        self.ref = ref
        self.tokens = list(_tokens(text))
        self.at = 0

    def _peek(self) -> tuple[str, str]:
        return self.tokens[self.at] if self.at < len(self.tokens) else ("end", "the end of the line")

    def _next(self, wanted: str = "") -> tuple[str, str]:
        token = self._peek()
        if wanted and token[1] != wanted:
            raise ValueError(f"expected {wanted!r}, found {token[1]!r}")
        self.at += 1
        return token

    def whole(self) -> Any:
        """Parse the line as one argument."""
        value = self._value()
        if self._peek()[0] != "end":
            raise ValueError(f"cannot read {self._peek()[1]!r}")
        return value

    def call(self) -> tuple[str, list[Any], dict[str, Any]]:
        """`name(a, b, key=c)`."""
        kind, name = self._next()
        if kind != "name":
            raise ValueError(f"expected the name of an op, found {name!r}")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        self._next("(")
        while self._peek()[1] != ")":
            after = self.tokens[self.at + 1][1] if self.at + 1 < len(self.tokens) else ""
            if self._peek()[0] == "name" and after == "=":
                key = self._next()[1]
                self._next("=")
                kwargs[key] = self._value()
            else:
                args.append(self._value())
            if self._peek()[1] != ")":
                self._next(",")
        self._next(")")
        if self._peek()[0] != "end":
            raise ValueError(f"cannot read {self._peek()[1]!r} after the call")
        return name, args, kwargs

    def _value(self) -> Any:
        kind, text = self._next()
        if text == "[":
            return self._list()
        match kind:
            case "ref":
                return self.ref(text)
            case "complex":
                return complex(text)
            case "number":
                return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
            case "string":
                return text[1:-1].encode().decode("unicode_escape")
            case "name":
                return _word(text)
        raise ValueError(f"expected a value, found {text!r}")

    def _list(self) -> list[Any]:
        items = []
        while self._peek()[1] != "]":
            items.append(self._value())
            if self._peek()[1] != "]":
                self._next(",")
        self._next("]")
        return items


def _word(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith("torch."):
        found = getattr(torch, text.removeprefix("torch."), None)
        if isinstance(found, torch.dtype | torch.layout | torch.memory_format):
            return found
    try:
        return torch.device(text) if _DEVICE.match(text) else _no_value(text)
    except RuntimeError:  # unknown to torch as a device
        return _no_value(text)


def _no_value(text: str) -> Any:
    raise ValueError(f"{text!r} is no value")


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    text = text.strip()
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"cannot read {text[at:]!r}")
        yield found.lastgroup, found[found.lastgroup]
        at = found.end()

"""Translate Metal source to C++. A few rules rewrite what C++ cannot express, line by line, so that errors of the compiler or of a
run name the line of the Metal text.

- `device T*`, `constant T*` and `threadgroup T*` become `shim::ptr<T>` everywhere;
- `threadgroup T name[N];` becomes a `shim::Shared<T, N>`;
- attributes of parameters are removed; a generated caller for each kernel passes what they ask for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_POINTER = re.compile(r"\b(device|constant|threadgroup)\s+(const\s+)?((?:[\w:]+)(?:<[^<>]*>)?)\s*\*")
_ARRAY = re.compile(r"\bthreadgroup\s+([\w:]+)\s+(\w+)\[(\d+)\];")
_ATTRIBUTE = re.compile(r"\[\[(\w+)(?:\((\d+)\))?\]\]")
_FUNCTION = re.compile(r"^(?:kernel|inline|template)\b(?:[^\n]*\}$|.*?^\})", re.MULTILINE | re.DOTALL)
_KERNEL = re.compile(r"^kernel\s+void\s+(\w+)\(([^{]*)\)\s*\{", re.MULTILINE)
_MOST = re.compile(r"\[\[max_total_threads_per_threadgroup\((\d+)\)\]\]")
_NAME = re.compile(r"(\w+)\s*\(")
_MEETING = re.compile(r"\b(?:simd_\w+|threadgroup_barrier|simdgroup_barrier)\s*\(")

BYTES = {
    "char": 1,
    "uchar": 1,
    "bool": 1,
    "short": 2,
    "half": 2,
    "bfloat": 2,
    "int": 4,
    "uint": 4,
    "float": 4,
    "long": 8,
}
"""Sizes of Metal's scalar types."""

PLACES = {
    "thread_position_in_grid": "in_grid",
    "thread_position_in_threadgroup": "in_group",
    "threadgroup_position_in_grid": "group_in_grid",
    "threads_per_grid": "grid",
    "threads_per_threadgroup": "group",
    "thread_index_in_threadgroup": "index",
    "thread_index_in_simdgroup": "lane",
    "simdgroup_index_in_threadgroup": "simd",
    "simdgroups_per_threadgroup": "simds",
}
"""Attributes for thread positions -> the shim's names."""


class NotMetal(ValueError):
    """Source that the shim cannot parse. The message says where."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a kernel: `buffer` is its index in the argument table; otherwise `place` is the position it asks for."""

    name: str
    type: str
    writes: bool
    buffer: int | None
    place: str


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel function. `meets`: its threads synchronize at barriers or in simdgroup functions; `line`: its first source line;
    `most`: largest threadgroup it is compiled for, if declared."""

    name: str
    parameters: tuple[Parameter, ...]
    meets: bool
    threadgroup_bytes: int
    line: int
    most: int | None = None

    @property
    def buffers(self) -> list[Parameter]:
        """The buffer parameters in argument-table order."""
        found = [p for p in self.parameters if p.buffer is not None]
        return sorted(found, key=lambda p: p.buffer or 0)


def functions(text: str) -> list[Function]:
    """Return the kernel functions of a source. Raise `NotMetal` if one cannot be parsed."""
    meeting = _meeting(text)
    return [_function(text, m, meeting) for m in _KERNEL.finditer(text)]


def _function(text: str, m: re.Match[str], meeting: set[str]) -> Function:
    name, line = m[1], text.count("\n", 0, m.start()) + 1
    parameters = tuple(_parameter(name, p.strip()) for p in m[2].split(",") if p.strip())
    order = sorted(p.buffer for p in parameters if p.buffer is not None)
    if order != list(range(len(order))) or len(order) > 31:
        raise NotMetal(f"{name}: buffers are numbered {order}; number them from 0 on, 31 at most")
    body = text[m.start() : text.find("\n}", m.start())]
    used = sum(BYTES[t] * int(n) for t, _, n in _ARRAY.findall(body))
    before = text[text.rfind("\n", 0, max(m.start() - 1, 0)) + 1 : m.start()]
    most = _MOST.match(before)
    return Function(name, parameters, name in meeting, used, line, int(most[1]) if most else None)


def _parameter(kernel: str, text: str) -> Parameter:
    found = _ATTRIBUTE.search(text)
    if found is None:
        raise NotMetal(f"{kernel}: parameter {text!r} has no attribute")
    declared = text[: found.start()].strip()
    name = declared.split()[-1].lstrip("*")
    if found[1] == "buffer":
        pointer = _POINTER.match(declared)
        if pointer is None:
            raise NotMetal(f"{kernel}: buffer {declared!r} is no pointer to device or constant memory")
        return Parameter(name, pointer[3], pointer[1] == "device" and pointer[2] is None, int(found[2]), "")
    if found[1] not in PLACES:
        raise NotMetal(f"{kernel}: the shim does not know [[{found[1]}]]")
    return Parameter(name, declared.split()[0], False, None, PLACES[found[1]])


def _meeting(text: str) -> set[str]:
    """Return the functions whose threads synchronize, directly or through functions they call."""
    bodies = {_named(b): b for b in _FUNCTION.findall(text)}
    found = {name for name, body in bodies.items() if _MEETING.search(body)}
    while more := {n for n, b in bodies.items() if n not in found and found & set(_NAME.findall(b))}:
        found |= more
    return found


def _named(function: str) -> str:
    """Return the name of a function: the word before its first parenthesis, without template parameters."""
    head = re.sub(r"^template\s*<[^{;]*?>\s*", "", function)
    found = _NAME.search(head)
    return found[1] if found else ""


def to_cpp(text: str, kernels: list[Function]) -> str:
    """Return the source as C++, with a caller per kernel that runs it for one thread."""
    lines = _ATTRIBUTE.sub(lambda m: " " * len(m[0]), text)
    lines = _ARRAY.sub(r'static shim::Shared<\1, \3> \2("\2");', lines)
    lines = _POINTER.sub(lambda m: f"shim::ptr<{'const ' if m[2] or m[1] == 'constant' else ''}{m[3]}> ", lines)
    return "\n".join(['#line 1 "metal"', lines, '#line 1 "callers"', *_callers(kernels), ""])


def _callers(kernels: list[Function]) -> Iterator[str]:
    for k in kernels:
        args = ", ".join(
            f"shim::argument<{'' if p.writes else 'const '}{p.type}>(args[{p.buffer}])"
            if p.buffer is not None
            else f"at.{p.place}"
            for p in k.parameters
        )
        unused = "".join(f" (void){x};" for x, use in (("args", "args["), ("at", "at.")) if use not in args)
        head = f'extern "C" void shim_body_{k.name}(const shim::Argument* args, const shim::Thread& at)'
        yield f"{head} {{{unused} {k.name}({args}); }}"

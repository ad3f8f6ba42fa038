"""Python state as text and JSON data that is equal in another process: what the attributes of a model hold, and the code of
functions. Nothing in it depends on addresses, file paths or the order of sets."""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy
import torch

from fusewright import _torch_compat as compat
from fusewright.errors import ArtifactError, printable
from fusewright.interface import HOST

PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, PurePath, range, slice)
_OPAQUE = (logging.Logger, types.ModuleType, torch.Generator, torch.fx.Graph, torch.fx.Node)
"""What no result depends on, or what cannot be compared: described by its type alone."""
IDLE = frozenset(
    "transformers_version _name_or_path name_or_path _commit_hash pretrained_cfg default_cfg warnings_issued "
    "_is_hf_initialized _original_object_hash extra_repr".split()
)
"""Attributes and configuration entries of models in wide use that affect no result."""
LONG = 64
"""Containers of plain values with more entries are described by a hash."""
SMALL = 4
"""Values of so many parts are described in full each time."""
MOST, DEPTH = 200_000, 40
"""Objects that are described at most, and how deep below an attribute."""


_Said = tuple[Any, str, int]
"""A description, the hash of all of it, and the number of its parts."""


class Describer:
    """Describes values as text, lists and dicts. A larger value that comes up again is described by the place where it came up
    first, whether it is the same object or an equal one. `names` are those of tensors and modules that are described elsewhere,
    by id. What was walked is kept, for `watch.Watch`."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._known: dict[int, _Said] = {}
        self._first: dict[str, str] = {}
        self._alive: list[Any] = []  # so that no id is reused
        self._open: list[int] = []
        self.containers: list[dict[Any, Any] | list[Any]] = []
        self.sets: list[set[Any]] = []
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[numpy.ndarray[Any, Any]] = []
        self.slots: list[tuple[Any, str]] = []

    def attributes(self, held: Mapping[str, Any], where: str) -> dict[str, Any]:
        return {k: self.value(v, f"{where}.{k}") for k, v in held.items() if k not in IDLE}

    def value(self, x: Any, where: str) -> Any:
        return self._said(x, where)[0]

    def _said(self, x: Any, where: str) -> _Said:
        if type(x) in PLAIN:
            return _text(repr(x))
        if (name := self._names.get(id(x))) is not None:
            return _text(f"model: {name}")
        if (known := self._known.get(id(x))) is not None:
            return self._shortened(known, where)
        if id(x) in self._open:
            return _text("one that holds this")
        if isinstance(x, _OPAQUE) or len(self._open) > DEPTH:
            return _text(name_of(type(x)))
        self._alive.append(x)
        if len(self._alive) > MOST:
            raise ArtifactError(f"a model leads to over {MOST} objects, the last at {where}; keep from it what it never reads")
        self._open.append(id(x))
        found = self._known[id(x)] = self._described(x, where)
        self._open.pop()
        return self._shortened(found, where)

    def _shortened(self, found: _Said, where: str) -> _Said:
        data, digest, parts = found
        first = self._first.setdefault(digest, where) if parts > SMALL else where
        return (data if first == where else f"as {first}"), digest, parts

    def _described(self, x: Any, where: str) -> _Said:
        if isinstance(x, enum.Enum):
            return _text(f"{name_of(type(x))}.{x.name}")
        if isinstance(x, _NAMED):
            return _text(str(x))
        if isinstance(x, list | tuple):
            self.containers += [x] if isinstance(x, list) else []
            return _digest(x) or self._list(x, where)
        if isinstance(x, dict):
            self.containers.append(x)
            return _digest(x) or self._dict({self._key(k, where): v for k, v in x.items()}, where)
        if isinstance(x, set | frozenset):
            self.sets += [x] if isinstance(x, set) else []
            return _text(str(sorted(self._key(v, where) for v in x)))
        if isinstance(x, torch.Tensor):
            return self._tensor(x, where)
        if isinstance(x, deque):
            return self._list(x, where)
        if isinstance(x, numpy.ndarray):
            self.arrays.append(x)
            return _text(f"{x.dtype}{list(x.shape)} {_hash(numpy.ascontiguousarray(x).tobytes())}")
        found = self._function(x, where)
        return self._object(x, where) if found is None else found

    def _list(self, held: Iterable[Any], where: str) -> _Said:
        said = [self._said(v, f"{where}[{k}]") for k, v in enumerate(held)]
        return [d for d, _, _ in said], _hash(repr([h for _, h, _ in said]).encode()), sum(n for _, _, n in said)

    def _dict(self, held: Mapping[str, Any], where: str) -> _Said:
        said = {k: self._said(v, f"{where}.{k}") for k, v in held.items() if k not in IDLE}
        whole = _hash(repr([(k, h) for k, (_, h, _) in said.items()]).encode("utf-8", "surrogatepass"))
        return {k: d for k, (d, _, _) in said.items()}, whole, sum(n for _, _, n in said.values())

    def _key(self, x: Any, where: str) -> str:
        return x if type(x) is str else self._said(x, f"{where} key")[1] if isinstance(x, tuple) else str(self.value(x, where))

    def _tensor(self, x: torch.Tensor, where: str) -> _Said:
        kind = f"{name_of(type(x))} {str(x.dtype).removeprefix('torch.')} {x.device.type}"
        if compat.is_wrapper(x):
            inner, context = x.__tensor_flatten__()  # type: ignore[attr-defined]
            return self._dict({"class": kind, **{k: getattr(x, k) for k in inner}, "context": context}, where)
        self.tensors.append(x)
        try:
            dense = x.detach().to(HOST).contiguous()
            content = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
            return _text(f"{kind} {list(x.shape)} {list(x.stride())} {_hash(content)}")
        except (RuntimeError, NotImplementedError, TypeError) as e:  # no values, or none that can be read
            return _text(f"{kind}: {printable(e)[:80]}")

    def _function(self, x: Any, where: str) -> _Said | None:
        """A function, method, class or partial application; None for other objects."""
        if isinstance(x, type):
            return _text(name_of(x))
        if isinstance(x, functools.partial):
            return self._list((x.func, x.args, x.keywords), where)
        if isinstance(x, types.MethodType):
            return self._list((x.__func__, x.__self__), where)
        if isinstance(x, types.FunctionType):
            bound = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), *_cells(x)]
            name = f"{x.__module__}.{x.__qualname__} {_hash(repr(list(_code(x.__code__))).encode())}"
            return self._list((_Words(name), *bound), where) if bound else _text(name)
        if isinstance(x, property):
            return self._list((x.fget, x.fset, x.fdel), where)
        if callable(inner := getattr(x, "__wrapped__", None)) or callable(inner := getattr(x, "__func__", None)):
            return self._list((type(x), inner), where)
        if isinstance(x, types.BuiltinFunctionType | types.MethodDescriptorType) or compat.is_overload(x):
            return _text(f"{getattr(x, '__module__', None)}.{getattr(x, '__qualname__', x)}")
        return None

    def _object(self, x: Any, where: str) -> _Said:
        if type(x) is _Words:
            return _text(x.text)
        held = vars(x) if hasattr(x, "__dict__") else {}
        slots = {k: getattr(x, k) for c in type(x).__mro__ for k in _slots(c) if hasattr(x, k)}
        self.slots += [(x, k) for k in slots]
        if isinstance(held, dict):
            self.containers.append(held)
        if not held and not slots:
            return _text(f"{name_of(type(x))} {x!r}" if isinstance(x, numpy.generic) else name_of(type(x)))
        return self._dict({"class": type(x), **slots, **held}, where)


@dataclass(frozen=True)
class _Words:
    text: str


def _text(text: str) -> _Said:
    return text, _hash(text.encode("utf-8", "surrogatepass")), 1


def functions(kind: type) -> dict[str, Any]:
    """The functions and other attributes that a class defines, without what Python adds."""
    return {k: v for k, v in vars(kind).items() if callable(v) or not (k.startswith("__") or k == "_abc_impl")}


def _slots(kind: type) -> Sequence[str]:
    found = vars(kind).get("__slots__", ())
    return [k for k in ((found,) if isinstance(found, str) else found) if not k.startswith("__")]


def _digest(x: Sequence[Any] | dict[Any, Any]) -> _Said | None:
    """A hash of a long container of plain values; None for others."""
    if len(x) <= LONG or not set(map(type, x.values() if isinstance(x, dict) else x)) <= set(PLAIN):
        return None
    return _text(f"{len(x)} values, {_hash(repr(x).encode('utf-8', 'surrogatepass'))}")


def _cells(x: types.FunctionType) -> Iterator[Any]:
    for cell in x.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            yield None


def _code(code: types.CodeType) -> Iterator[Any]:
    """What a function computes, without the places of its lines."""
    yield code.co_code, code.co_names, code.co_varnames, code.co_freevars
    for c in code.co_consts:
        yield list(_code(c)) if isinstance(c, types.CodeType) else sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"

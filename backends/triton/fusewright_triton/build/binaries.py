"""Kernels as machine code: requests to the compiler, and what is kept of its answers."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from fusewright.toolkit.ir.ir import Kernel
from fusewright_triton.build import workers
from fusewright_triton.build.workers import BuildError
from fusewright_triton.emit.emitter import Source, emit
from fusewright_triton.emit.operators import SIGNATURE
from fusewright_triton.emit.schedule import Config
from fusewright_triton.target import Target

T = TypeVar("T")
R = TypeVar("R")


class Variant(NamedTuple):
    """The assumptions of a binary: `aligned`, all addresses are multiples of 16 bytes; `even`, all sizes are multiples
    of 16; `wide`, offsets may need 64 bits."""

    wide: bool = False
    aligned: bool = True
    even: bool = False


@dataclass(frozen=True, slots=True)
class Binary:
    """One function's machine code. `listing` is the assembly text if it was built here, "" if loaded. `descriptors`
    holds the driver's settings for each tensor descriptor among the parameters."""

    name: str
    code: bytes
    shared: int
    threads: int
    listing: str = ""
    descriptors: Sequence[Mapping[str, Any]] = ()


Code: TypeAlias = Sequence[Binary]
"""Of each function of a source."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A kernel to build, with its configuration."""

    kernel: Kernel
    config: Config
    variant: Variant

    def source(self) -> Source:
        return emit(self.kernel, self.config, self.variant.wide)


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel's source and the machine code of its functions, which may have the names of an equal kernel's."""

    kernel: Kernel
    config: Config
    source: Source
    binaries: Sequence[Binary]


def request(source: Source, variant: Variant, target: Target) -> dict[str, Any]:
    """Return the request that `compiler.build` takes."""
    aligned = [p.name for p in source.parameters if p.pointer and (variant.aligned or p.kind != "buffer")]
    aligned += [p.name for p in source.parameters if p.kind == "size" and variant.even]
    return {
        "text": source.text,
        "functions": [f.name for f in source.functions],
        "signature": {p.name: ("*" if p.pointer else "") + SIGNATURE[p.dtype] for p in source.parameters},
        "aligned": aligned,
        "options": {"num_warps": source.warps, **dict(target.options)},
        "target": target.compiler,
    }


def build(wanted: Sequence[Wanted], target: Target) -> list[Built]:
    """Build kernels in parallel; results keep the order of `wanted`. Raise `workers.BuildError` when Triton fails on one."""
    return [answer.result() for answer in ask(wanted, target, {})]


def ask(wanted: Sequence[Wanted], target: Target, code: MutableMapping[str, Future[Code]]) -> list[Future[Built]]:
    """Like `build`, but in the background. `code` holds earlier answers by `unnamed` request, and gets the new ones: kernels that
    differ only in their names, or in sizes that their text does not show, share the code of the first."""
    sources = [w.source() for w in wanted]
    requests = _requests(wanted, sources, target)
    keys = [unnamed(r) for r in requests]
    new = dict[str, dict[str, Any]]()
    for key, r in zip(keys, requests, strict=True):
        if key not in code or _failed(code[key]):
            new.setdefault(key, r)
    answers = [then(answer, _code) for answer in workers.submitted(list(new.values()))]
    code.update(zip(new, answers, strict=True))
    return [then(code[key], partial(Built, w.kernel, w.config, s)) for w, s, key in zip(wanted, sources, keys, strict=True)]


def build_each(wanted: Sequence[Wanted], target: Target) -> list[Built | BuildError]:
    """Like `build`, but a kernel that fails gives its error and the others are built."""
    sources = [w.source() for w in wanted]
    answers = workers.build_each(_requests(wanted, sources, target))
    return [
        answer if isinstance(answer, BuildError) else _built(w, s, answer)
        for w, s, answer in zip(wanted, sources, answers, strict=True)
    ]


def _requests(wanted: Sequence[Wanted], sources: Sequence[Source], target: Target) -> list[dict[str, Any]]:
    return [request(s, w.variant, target) for s, w in zip(sources, wanted, strict=True)]


def _built(wanted: Wanted, source: Source, answer: workers.Answer) -> Built:
    return Built(wanted.kernel, wanted.config, source, _code(answer))


def unnamed(request: Mapping[str, Any]) -> str:
    """Return a request as text, without what does not change the code: comments and the names of functions."""
    lines = [line for line in request["text"].splitlines() if not line.startswith("#")]
    text = [f"def {line.partition('(')[2]}" if line.startswith("def ") else line for line in lines]
    return json.dumps({**request, "text": text, "functions": len(request["functions"])})


def _failed(answer: Future[Code]) -> bool:
    return answer.done() and answer.exception() is not None


def _code(answer: workers.Answer) -> Code:
    return [binary(b) for b in answer]


def then(answer: Future[T], make: Callable[[T], R]) -> Future[R]:
    """Return a future of what `make` returns for an answer."""
    made: Future[R] = Future()

    def done(answer: Future[T]) -> None:
        error = answer.exception()
        if error is not None:
            made.set_exception(error)
        else:
            made.set_result(make(answer.result()))

    answer.add_done_callback(done)
    return made


def binary(data: Mapping[str, Any], name: str = "") -> Binary:
    """Return the compiler's answer for a function as a binary, under its own name or `name`."""
    code = base64.b64decode(data["code"])
    made = name or data["name"], code, data["shared"], data["threads"], data.get("listing", "")
    return Binary(*made, tuple(data.get("descriptors", ())))

"""Kernels as machine code: requests to the compiler, and what is kept of its answers."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from fusewright.toolkit.ir.ir import Kernel
from fusewright_triton.build import workers
from fusewright_triton.build.workers import BuildError, build_all
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
    """A kernel's source and the machine code of its functions."""

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
    sources = [w.source() for w in wanted]
    answers = build_all(_requests(wanted, sources, target))
    return [_built(w, s, answer) for w, s, answer in zip(wanted, sources, answers, strict=True)]


def ask(wanted: Sequence[Wanted], target: Target) -> list[Future[Built]]:
    """Like `build`, but in the background."""
    sources = [w.source() for w in wanted]
    answers = workers.submitted(_requests(wanted, sources, target))
    return [_later(w, s, answer) for w, s, answer in zip(wanted, sources, answers, strict=True)]


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


def _built(wanted: Wanted, source: Source, answer: Sequence[Mapping[str, Any]]) -> Built:
    return Built(wanted.kernel, wanted.config, source, [binary(b) for b in answer])


def _later(wanted: Wanted, source: Source, answer: Future[workers.Answer]) -> Future[Built]:
    return then(answer, lambda found: _built(wanted, source, found))


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

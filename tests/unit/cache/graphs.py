"""Graphs whose plans are stored on disk, and a way to tell whether a run compiled them or found them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from fusewright import pipeline
from fusewright.cache import place, store
from fusewright.cache.folder import Folder

Function = Callable[..., torch.Tensor]


def affine(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 3 - 2)


def shifted(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x + 1)


def compiled(fn: Function, backend: str = "x86_onednn", **options: object) -> Function:
    """Compile `fn` as another process would."""
    torch.compiler.reset()
    return torch.compile(fn, backend=backend, options={"fallback": "allow", **options})  # type: ignore[no-any-return]


@contextmanager
def counted() -> Iterator[list[str]]:
    """Collect the names of the plans compiled within the block."""
    found: list[str] = []
    compile_ = pipeline._compile

    def spy(c: pipeline.Compilation) -> object:
        found.append(c.slot.key.name if c.slot else "")
        return compile_(c)

    pipeline._compile = spy  # type: ignore[assignment]
    try:
        yield found
    finally:
        pipeline._compile = compile_


def folder() -> Folder:
    found = place.cache()
    assert found is not None
    return found


def names() -> list[str]:
    return [e.name for e in store.entries()]

"""A compiled shader library in simulation, with the interface of `torch.mps.compile_shader`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class ShaderFunction(Protocol):
    """One kernel function. `threads` counts threads, not threadgroups; at most three directions."""

    def __call__(self, *args: Any, threads: Sequence[int], group_size: Sequence[int]) -> None: ...


class ShaderLibrary(Protocol):
    """Functions are attributes by their names in the source, as of torch's."""

    def __getattr__(self, entry: str) -> ShaderFunction: ...

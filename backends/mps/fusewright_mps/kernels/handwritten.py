"""The base of handwritten kernels: fields that are numbers and names, and the Metal text generated from them.

A plan launches them like loop kernels: they have buffers, scalars, sizes, a hash, and JSON for the cache.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch

from fusewright.toolkit.ir.ir import Buffer, Scalar
from fusewright.toolkit.ir.types import DType
from fusewright_mps.emit.source import Argument, Dispatch, Source, Variant, most_threads

METAL = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}
"""Metal's names of the input types of kernels; sums are fp32."""
SHORT: dict[str, DType] = {
    "float": "f32",
    "half": "f16",
    "bfloat": "bf16",
    "char": "i8",
    "uchar": "u8",
    "int": "i32",
    "bool": "bool",
}
"""Kernel IR names of Metal's types."""


@dataclass(frozen=True, slots=True)
class Handwritten(ABC):
    """A kernel of fixed sizes. Its function takes the buffers in order, then the scalars (fp32), then the sizes."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """The function's name; different texts have different names."""

    @property
    @abstractmethod
    def buffers(self) -> tuple[Buffer, ...]: ...

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The values of the parameter `constant long* sizes`."""

    @property
    @abstractmethod
    def threads(self) -> tuple[int, int, int]: ...

    @property
    @abstractmethod
    def threadgroup(self) -> tuple[int, int, int]: ...

    @abstractmethod
    def text(self, aligned: bool = True) -> str:
        """Return the text of the function. `aligned`: buffers start at multiples of `alignment`."""

    @property
    def alignment(self) -> tuple[int, ...]:
        """Alignment of each buffer that vector accesses need, in bytes."""
        return (1,) * len(self.buffers)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return ()

    @property
    def hints(self) -> tuple[int, ...]:
        """The sizes, which the launch passes like the values of size symbols."""
        return self.sizes

    @property
    def symbols(self) -> range:
        return range(len(self.sizes))

    def source(self, variant: Variant) -> Source:
        """Return a `Source`, as the emitter does for loop kernels."""
        buffers = tuple(Argument("buffer", k) for k in range(len(self.buffers)))
        arguments = (*buffers, *((Argument("reals"),) if self.scalars else ()), Argument("sizes"))
        alignment = self.alignment if variant.aligned else (1,) * len(self.buffers)
        name = self.name if variant.aligned else f"{self.name}_unaligned"
        text = self.text(variant.aligned).replace(f"void {self.name}(", f"void {name}(", 1)
        dispatch = Dispatch(name, arguments, self.threads, self.threadgroup)
        text = f"{most_threads(self.threadgroup)}\n{text}"
        return Source(self, variant, text, (dispatch,), alignment)  # type: ignore[arg-type]


def vector(kind: str, count: int, buffer: str, at: str, aligned: bool) -> str:
    """Return `count` neighbouring elements of a buffer: one vector load if aligned, else element by element."""
    if count == 1:
        return f"{buffer}[{at}]"
    if aligned:
        return f"*(device const {kind}{count}*)({buffer} + ({at}))"
    return f"{kind}{count}({', '.join(f'{kind}({buffer}[{at} + {e}])' for e in range(count))})"


def hash_of(kernel: Handwritten) -> str:
    """Return the SHA-256 (hex) of the kernel's JSON; the same in every process."""
    return hashlib.sha256(json.dumps(to_json(kernel), sort_keys=True).encode()).hexdigest()


def to_json(kernel: Handwritten) -> dict[str, Any]:
    return {"by_hand": kernel.kind, **asdict(kernel)}


def from_json(data: Mapping[str, Any], kinds: Mapping[str, type[Handwritten]]) -> Handwritten:
    """Return the kernel that `to_json` described. Raise KeyError or TypeError for unknown kinds or fields."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "by_hand"}
    return kinds[data["by_hand"]](**fields)

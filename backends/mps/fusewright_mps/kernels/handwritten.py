"""What a kernel written by hand is: fields that are numbers and names, and the Metal text that follows from them.

A plan launches it as it launches a loop kernel: it has buffers, scalars and sizes, a hash, and JSON for the cache.
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
"""Metal's names of the types that kernels compute from; sums are fp32."""
SHORT: dict[str, DType] = {
    "float": "f32",
    "half": "f16",
    "bfloat": "bf16",
    "char": "i8",
    "uchar": "u8",
    "int": "i32",
    "bool": "bool",
}
"""Names of the kernel IR for them."""


@dataclass(frozen=True, slots=True)
class Handwritten(ABC):
    """One kernel of fixed sizes. Its function takes the buffers in order, then the scalars (fp32), then the sizes."""

    kind: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """The function's name: what differs in its text differs in its name."""

    @property
    @abstractmethod
    def buffers(self) -> tuple[Buffer, ...]: ...

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """What the function reads as `constant long* sizes`."""

    @property
    @abstractmethod
    def threads(self) -> tuple[int, int, int]: ...

    @property
    @abstractmethod
    def threadgroup(self) -> tuple[int, int, int]: ...

    @abstractmethod
    def text(self, aligned: bool = True) -> str:
        """The function; `aligned`: buffers begin where `alignment` wants them."""

    @property
    def alignment(self) -> tuple[int, ...]:
        """What vectors want of each buffer, in bytes."""
        return (1,) * len(self.buffers)

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return ()

    @property
    def hints(self) -> tuple[int, ...]:
        """Sizes are given with the launch, as those of symbols are."""
        return self.sizes

    @property
    def symbols(self) -> range:
        return range(len(self.sizes))

    def source(self, variant: Variant) -> Source:
        """As the emitter gives it."""
        buffers = tuple(Argument("buffer", k) for k in range(len(self.buffers)))
        arguments = (*buffers, *((Argument("reals"),) if self.scalars else ()), Argument("sizes"))
        alignment = self.alignment if variant.aligned else (1,) * len(self.buffers)
        name = self.name if variant.aligned else f"{self.name}_unaligned"
        text = self.text(variant.aligned).replace(f"void {self.name}(", f"void {name}(", 1)
        dispatch = Dispatch(name, arguments, self.threads, self.threadgroup)
        text = f"{most_threads(self.threadgroup)}\n{text}"
        return Source(self, variant, text, (dispatch,), alignment)  # type: ignore[arg-type]


def vector(kind: str, count: int, buffer: str, at: str, aligned: bool) -> str:
    """`count` neighbours of a buffer, in one load where it is aligned."""
    if count == 1:
        return f"{buffer}[{at}]"
    if aligned:
        return f"*(device const {kind}{count}*)({buffer} + ({at}))"
    return f"{kind}{count}({', '.join(f'{kind}({buffer}[{at} + {e}])' for e in range(count))})"


def hash_of(kernel: Handwritten) -> str:
    """SHA-256 (hex) of what the function computes; equal in every process."""
    return hashlib.sha256(json.dumps(to_json(kernel), sort_keys=True).encode()).hexdigest()


def to_json(kernel: Handwritten) -> dict[str, Any]:
    return {"by_hand": kernel.kind, **asdict(kernel)}


def from_json(data: Mapping[str, Any], kinds: Mapping[str, type[Handwritten]]) -> Handwritten:
    """What `to_json` described. KeyError or TypeError for what is unknown."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items() if k != "by_hand"}
    return kinds[data["by_hand"]](**fields)

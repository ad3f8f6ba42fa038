"""Where eager is faster than a kernel: one table of conditions, each with what was measured.

Nothing else in the fuser prefers eager: what has a rule and is in no row here becomes a kernel. `faster` is asked before groups
are made, about every op (rows for wherever an op stands), and once they are made, about every op that has a kernel to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusewright.interface import Device, OpView, Value
from fusewright.toolkit.ir import IndexTooComplex, Kernel, crosses
from fusewright.toolkit.rules.evaluate import NotAligned
from fusewright.toolkit.rules.flow import Flow
from fusewright.toolkit.rules.space import ShapeMismatch, layout_of

LARGE = 1 << 17
"""Bytes of a result from which on a row about size holds: a smaller one costs what the call costs."""
ZIPPED = 6
"""Tensors that a kernel stacks along a new last dimension by zipping vectors: two of 1024x768 in 0.13 ms, eager 0.53."""


class Alone:
    """The kernel of one op and nothing else. `kernel` builds it."""

    def __init__(self, op: OpView, flow: Flow, kernel: Callable[[], Kernel]) -> None:
        self.op, self.flow, self.kernel = op, flow, kernel

    def only_moves(self) -> bool:
        """Whether all that it reads lies in memory: no inlined op computes it on the way."""
        return not any(self._computes(v) for v in self.op.inputs())

    def transposes(self) -> bool:
        """Whether it loads along another axis than it stores: kernels do that in tiles, eager does not."""
        if self.op.op not in ("clone", "reshape"):
            return False
        try:
            return crosses(self.kernel())
        except (NotAligned, IndexTooComplex, ShapeMismatch):
            return False

    def _computes(self, v: Value) -> bool:
        made = self.flow.producer.get(v.id)
        if made is None or not (self.flow.is_view(made[0]) or self.flow.is_inline(made[0])):
            return False
        return self.flow.is_inline(made[0]) or any(self._computes(x) for x in made[0].inputs())


def _anything(op: OpView) -> bool:
    return True


def _channels_last(op: OpView) -> bool:
    """Dense channels-last images; eager's group norm refuses every other layout that is not contiguous."""
    spec = next(op.inputs()).spec
    return spec is not None and layout_of(spec) == "channels_last"


def _fp32_rows(op: OpView) -> bool:
    """fp32 images whose rows are dense."""
    spec = op.out.spec
    return spec is not None and spec.dtype == torch.float32 and spec.stride[-1] == 1


def _not_zipped(op: OpView) -> bool:
    spec = op.out.spec
    zipped = op.op == "stack" and spec is not None and op.arg("dim") in (-1, spec.rank - 1)
    return not zipped or len(op.arg("tensors")) > ZIPPED


@dataclass(frozen=True)
class Condition:
    """One row. It depends on the type of the device, "" for all; `least` are bytes of the result.

    `when` looks at an op's metadata. `alone`: None for an op wherever it stands, else what its kernel must be that holds
    nothing else.
    """

    name: str
    ops: frozenset[str]
    why: str
    device: str = ""
    least: int = 0
    when: Callable[[OpView], bool] = _anything
    alone: Callable[[Alone], bool] | None = None

    @property
    def note(self) -> str:
        """What `explain` says of such an op."""
        return f"eager: faster for {self.name}"

    def holds(self, op: OpView, device: Device, kernel: Alone | None) -> bool:
        """`kernel` is None as long as there are no groups."""
        if op.op not in self.ops or self.device not in ("", device.type) or (self.alone is not None and kernel is None):
            return False
        if self.least and (op.out.spec is None or op.out.spec.bytes_hint() < self.least):
            return False
        return self.when(op) and (self.alone is None or kernel is None or self.alone(kernel))


CONDITIONS: tuple[Condition, ...] = (
    Condition(
        "group norms of channels-last images", frozenset({"group_norm"}), device="cpu", when=_channels_last,
        why="a kernel's rows, a group's channels of all pixels, lie apart: with silu behind, 320x64x64 takes 1.96 ms, eager 0.28",
    ),
    Condition(
        "rows of a table", frozenset({"embedding", "index_select"}), least=LARGE, alone=Alone.only_moves,
        why="a kernel looks at the index of every element: H100, bf16, 10.2 us, eager 7.9",
    ),
    Condition(
        "copies", frozenset({"clone", "reshape", "cat", "stack", "repeat"}), device="cpu", least=LARGE, when=_not_zipped,
        alone=lambda k: k.only_moves() and not k.transposes(),
        why="eager moves runs of elements: every second column of 4096x1024 3.4 ms, eager 0.73 (on GPUs a kernel takes half)",
    ),
    Condition(
        "images in fp32 planes, resized", frozenset({"upsample_bilinear2d"}), device="cpu", least=LARGE, when=_fp32_rows,
        alone=lambda k: True,
        why="eager goes along rows, a kernel gathers each element: 64x56x56 to 112x112 0.79 ms, eager 0.50",
    ),
)  # fmt: skip
"""Figures: docs/performance.md."""


def faster(op: OpView, device: Device, kernel: Alone | None = None) -> Condition | None:
    """The row by which eager computes an op that a kernel could compute, if there is one. `kernel`: its own, once it is known
    that no other op shares it."""
    return next((c for c in CONDITIONS if c.holds(op, device, kernel)), None)

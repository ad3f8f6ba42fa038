"""Where eager is faster than a kernel: conditions, which a backend gives with its policy, each with what was measured.

Nothing else in the fuser prefers eager: what has a rule and is in no row becomes a kernel. `faster` is asked before groups
are made, about every op (rows for wherever an op stands), and once they are made, about every op that has a kernel to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusewright.interface import OpView, Value
from fusewright.toolkit.ir import IndexTooComplex, Kernel, crosses
from fusewright.toolkit.rules.evaluate import NotAligned
from fusewright.toolkit.rules.flow import Flow
from fusewright.toolkit.rules.space import ShapeMismatch


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


@dataclass(frozen=True)
class Condition:
    """One row, of one device. `least` are bytes of the result; `source` names the device, the day and the record.

    `when` looks at an op's metadata. `alone`: None for an op wherever it stands, else what its kernel must be that holds
    nothing else.
    """

    name: str
    ops: frozenset[str]
    why: str
    source: str
    least: int = 0
    when: Callable[[OpView], bool] = _anything
    alone: Callable[[Alone], bool] | None = None

    @property
    def note(self) -> str:
        """What `explain` says of such an op."""
        return f"eager: faster for {self.name}"

    def holds(self, op: OpView, kernel: Alone | None) -> bool:
        """`kernel` is None as long as there are no groups."""
        if op.op not in self.ops or (self.alone is not None and kernel is None):
            return False
        if self.least and (op.out.spec is None or op.out.spec.bytes_hint() < self.least):
            return False
        return self.when(op) and (self.alone is None or kernel is None or self.alone(kernel))


def faster(rows: Sequence[Condition], op: OpView, kernel: Alone | None = None) -> Condition | None:
    """The row by which eager computes an op that a kernel could compute, if there is one. `kernel`: its own, once it is known
    that no other op shares it."""
    return next((c for c in rows if c.holds(op, kernel)), None)

"""Where eager is faster than a kernel: conditions from a backend's policy, each backed by a measurement.

Nothing else in the fuser prefers eager: any op that has a rule and matches no condition becomes a kernel. `faster` is asked
about every op before grouping (conditions that hold wherever the op stands), and after grouping about every op that has a
kernel to itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusewright.interface import OpView, Value
from fusewright.toolkit.ir import IndexTooComplex, Kernel, crosses
from fusewright.toolkit.rules.space import NotAligned, ShapeMismatch

if TYPE_CHECKING:  # a backend's policy names conditions, and a plan from the cache needs no more than the policy
    from fusewright.toolkit.rules.flow import Flow


class Alone:
    """An op that has a kernel to itself. `kernel` builds that kernel."""

    def __init__(self, op: OpView, flow: Flow, kernel: Callable[[], Kernel]) -> None:
        self.op, self.flow, self.kernel = op, flow, kernel

    def only_moves(self) -> bool:
        """Whether the op reads all inputs from memory: none is computed by an inlined op."""
        return not any(self._computes(v) for v in self.op.inputs())

    def transposes(self) -> bool:
        """Whether the op loads along another axis than it stores: kernels do that in tiles, eager does not."""
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
    """When eager is faster on one device. `least`: minimal bytes of the result; `source`: device, date and record of the
    measurement.

    `when` inspects an op's metadata. `alone`: None to apply to an op wherever it stands, else a condition on an op that has a
    kernel to itself.
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
        """The note that `explain` prints for such an op."""
        return f"eager: faster for {self.name}"

    def holds(self, op: OpView, kernel: Alone | None) -> bool:
        """Whether the condition applies. `kernel` is None before grouping."""
        if op.op not in self.ops or (self.alone is not None and kernel is None):
            return False
        if self.least and (op.out.spec is None or op.out.spec.bytes_hint() < self.least):
            return False
        return self.when(op) and (self.alone is None or kernel is None or self.alone(kernel))


def faster(rows: Sequence[Condition], op: OpView, kernel: Alone | None = None) -> Condition | None:
    """Return the condition under which eager computes an op despite its kernel rule, if any. `kernel`: the op's own kernel,
    once it is known that no other op shares it."""
    return next((c for c in rows if c.holds(op, kernel)), None)

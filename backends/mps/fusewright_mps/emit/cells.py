"""Emit the nodes of a stage for one point, or for a thread's neighbouring points along an axis: contiguous loads and stores become
vectors, and a loop over the neighbours computes the rest."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fusewright.toolkit.ir.ir import Node
from fusewright_mps.emit.addressing import atom
from fusewright_mps.emit.memory import Memory
from fusewright_mps.emit.operators import METAL
from fusewright_mps.emit.schedule import moves


class Cells(Memory):
    """Emits the nodes of a stage. `held` maps values kept in registers over the row to their arrays, which `step` indexes."""

    step = "s"

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.held: dict[int, str] = {}
        self.reading: set[int] = set()
        """Held values that an earlier pass over the row has already stored in registers."""

    def cell(self, nodes: Sequence[Node], over_row: bool, vector: int) -> None:
        """Emit all nodes in order, `vector` neighbours at once."""
        along = self.config.along
        if vector == 1 or along is None:
            self._each(nodes, over_row, "")
            return
        inside = [n for n in nodes if along in self.axes[n.id] or n.op in ("store", "reduce")]
        for n in nodes:
            if n not in inside:
                self.value(n)
        loads = [n for n in inside if n.op == "load" and n.id not in self.reading and self._wide(n, along, vector)]
        stores = [n for n in inside if n.op == "store" and self._wide(n, along, vector)]
        for n in loads:
            self._load(n, vector)
        if len(loads) + len(stores) == len(inside) and {n.args[0] for n in stores} <= {
            n.id for n in loads if n.id not in self.held
        }:
            self._vectors_stored(stores, vector, {n.id: f"w{n.args[0]}" for n in stores})
            return
        for n in stores:
            self.put(f"{METAL[n.dtype]}{vector} o{n.id};")
        with self.block(f"FW_UNROLL for (int k = 0; k < {vector}; k++)"):
            at = self.where[along]
            if self._placed(inside, loads, stores, along):
                self.put(f"const {self.integer} {at}_k = {at} + k;")
                self.where[along] = f"{at}_k"
            for n in loads:
                self.names[n.id] = f"w{n.id}[k]" if n.id not in self.held else f"{self.held[n.id]}[{self.step}][k]"
            done = {n.id for n in (*loads, *stores)}
            self._each([n for n in inside if n.id not in done or n in stores], over_row, "[k]", {n.id for n in stores})
        self._vectors_stored(stores, vector, {n.id: f"o{n.id}" for n in stores})

    def _vectors_stored(self, stores: Sequence[Node], vector: int, values: Mapping[int, str]) -> None:
        for n in stores:
            place = f"*(device {METAL[n.dtype]}{vector}*)({self.buffers[n.buffer or 0]} + {atom(self.index(n))})"
            self.put(f"{f'FW_ANY({place})' if n.index and n.index.indirect else place} = {values[n.id]};")

    def _wide(self, n: Node, along: int, vector: int) -> bool:
        """Whether an access can move `vector` neighbours as one vector: its address depends on `along` only through a stride."""
        fixed = n.index is None or not any(along in self.axes[i.value] for i in n.index.indirect)
        return moves(n, along, vector) and fixed and not (n.op == "store" and self.inside)

    def _placed(self, inside: Sequence[Node], loads: Sequence[Node], stores: Sequence[Node], along: int) -> bool:
        """Whether a node in the loop needs its position along the axis."""
        wide = {n.id for n in (*loads, *stores)} | (self.reading & set(self.held))
        return any(n.id not in wide and n.index is not None and along in n.index.axes() for n in inside) or any(
            n.op == "reduce" and n.how.startswith("arg") for n in inside
        )

    def _load(self, n: Node, vector: int) -> None:
        kind = f"{METAL[n.dtype]}{vector}"
        text = f"*(device const {kind}*)({self.buffers[n.buffer or 0]} + {atom(self.index(n))})"
        self.put(
            f"{self.held[n.id]}[{self.step}] = {text};" if n.id in self.held else f"const {kind} w{n.id} = {text};"
        )

    def _each(self, nodes: Sequence[Node], over_row: bool, lane: str, wide: Collection[int] = ()) -> None:
        for n in nodes:
            if n.id in self.reading:
                self.names[n.id] = f"{self.held[n.id]}[{self.step}]{lane}"
            elif n.id in wide:
                self.put(f"o{n.id}[k] = {self.operand(n.args[0])};")
            else:
                self.node(n, over_row)
                if n.id in self.held:
                    self.put(f"{self.held[n.id]}[{self.step}]{lane} = {self.names[n.id]};")

    def node(self, n: Node, over_row: bool) -> None:
        """Emit one node."""
        if n.op == "store":
            self.store(n, over_row)
        else:
            self.value(n)

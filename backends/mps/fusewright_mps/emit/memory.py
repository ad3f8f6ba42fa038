"""Emit plain and accumulating stores, and decide where accesses to the same memory need a barrier."""

from __future__ import annotations

from fusewright.toolkit.ir.index import Index
from fusewright.toolkit.ir.ir import Node
from fusewright.toolkit.ir.types import TYPES
from fusewright_mps.emit.addressing import atom
from fusewright_mps.emit.operators import METAL, cast, combined
from fusewright_mps.emit.source import Unsupported
from fusewright_mps.emit.values import Writer

FUNCTORS = {"add": "fw_sum_of", "mul": "fw_prod_of", "max": "fw_max_of", "min": "fw_min_of"}


class Memory(Writer):
    """Emits stores. `leader`: condition true in exactly one of the threads that share a point, "" if a thread has the point alone;
    `inside`: condition that the thread's element of the row exists, "" if it always does."""

    leader = ""
    inside = ""

    def _load_tests(self, n: Node) -> list[str]:
        asked = (
            [self.inside] if self.inside == "inside" and any(a >= len(self.kernel.p) for a in self.axes[n.id]) else []
        )
        return asked + super()._load_tests(n)

    def store(self, n: Node, over_row: bool) -> None:
        guards = [self.inside] if over_row else [self.leader]
        guards += [self.operand(a) for a in n.args[1:]]
        tests = [g for g in guards if g]
        if tests:
            with self.block(f"if ({tests[0] if len(tests) == 1 else ' && '.join(map(atom, tests))})"):
                self._store(n, over_row)
        else:
            self._store(n, over_row)

    def _store(self, n: Node, over_row: bool) -> None:
        value = self.operand(n.args[0])
        if not n.how:
            place = self.place(n)
            self.put(f"{f'FW_ANY({place})' if n.index and n.index.indirect else place} = {value};")
        elif self.conflicts(n, over_row):
            self._atomic(n, value)
        else:
            self._update(n, value)

    def _update(self, n: Node, value: str) -> None:
        """Accumulate where each element belongs to only one point."""
        kind, half = METAL[n.dtype], TYPES[n.dtype].kind == "float" and not TYPES[n.dtype].compute
        self.put(f"const {kind} n{n.id} = {self.place(n)};")
        old = f"float(n{n.id})" if half else f"n{n.id}"
        new = combined(n.how, "f32" if half else n.dtype, old, f"float({value})" if half else value)
        self.put(f"{self.place(n)} = {cast(new, 'f32', n.dtype) if half else new};")

    def _atomic(self, n: Node, value: str) -> None:
        """Accumulate where several points share an element. Metal has atomic f32 addition, and 32-bit integer addition and extrema;
        other forms use compare-and-exchange."""
        name, at = self.buffers[n.buffer or 0], self.index(n)
        own = {"f32": ("add",), "i32": ("add", "max", "min")}.get(n.dtype)
        if own and n.how in own:
            verb = f"atomic_fetch_{n.how}_explicit"
            self.put(f"{verb}((device atomic_{METAL[n.dtype]}*)({name} + {atom(at)}), {value}, memory_order_relaxed);")
        elif own:
            self.put(f"fw_atomic<{FUNCTORS[n.how]}>({name} + {atom(at)}, {value});")
        elif n.dtype in ("f16", "bf16"):
            kinds = f"{FUNCTORS[n.how]}, {METAL[n.dtype]}"
            word = f"(device uint*)({name}) + {atom(at)} / 2"
            self.put(f"fw_atomic_half<{kinds}>({word}, {atom(at)} % 2 != 0, float({value}));")
        else:
            raise Unsupported(
                f"points that meet in a sum of {n.dtype}: Metal has atomics of 32 bits; torch's own call adds them"
            )

    def conflicts(self, n: Node, over_row: bool) -> bool:
        """Whether two points of the stage may store to the same element."""
        index = _of(n)
        if index.indirect:
            return True
        axes = range(len(self.kernel.sizes) if over_row else len(self.kernel.p))
        return any(index.stride_of(a) in (0, None) for a in axes if self.kernel.sizes[a] != 1)


class Order:
    """Tracks accesses since the last barrier in kernels where threads share a point, so one thread may load what another stored."""

    def __init__(self) -> None:
        self.loads: list[tuple[Node, bool]] = []
        self.stored: set[int | None] = set()

    def before(self, n: Node, by_row: bool) -> bool:
        """Record an access, and return whether it needs a barrier first. `by_row`: each thread accesses only its own
        elements."""
        if n.op == "load":
            wait = n.buffer in self.stored
        else:
            wait = any(self._meets(m, rows, n, by_row) for m, rows in self.loads)
        if wait:
            self.loads, self.stored = [], set()
        if n.op == "load":
            self.loads.append((n, by_row))
        else:
            self.stored.add(n.buffer)
        return wait

    @staticmethod
    def _meets(load: Node, load_by_row: bool, store: Node, by_row: bool) -> bool:
        same = load.buffer == store.buffer
        over = same or (load.dtype == store.dtype and load.index == store.index)  # an output may alias an input
        return over and not (load.index == store.index and load_by_row and by_row)


def _of(n: Node) -> Index:
    if n.index is None:
        raise ValueError("the node lacks an index; verify the kernel first")
    return n.index

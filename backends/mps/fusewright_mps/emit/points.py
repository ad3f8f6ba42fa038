"""Thread positions, and kernels without rows: each thread computes one point, or neighbours along one axis."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.toolkit.ir.extent import Extent, apply, product
from fusewright_mps.emit.addressing import multiple
from fusewright_mps.emit.cells import Cells


def parts(size: Extent, of: int) -> Extent:
    """Return how many parts of `of` elements cover `size`."""
    return apply("FloorDiv", size + (of - 1), of) if of > 1 else size


class Points(Cells):
    """A function in which no two threads share a point."""

    def write(self) -> None:
        nodes = [n for s in self.kernel.stages for n in s.nodes]
        if self.strides():
            self._strided(nodes)
            return
        self.positions(self.config.vector)
        self.cell(nodes, over_row=False, vector=self.config.vector)

    def strides(self) -> bool:
        """Whether threads stride along the only axis: it has more vectors than threads, an unknown size, or a remainder."""
        if len(self.kernel.sizes) != 1 or self.kernel.r:
            return False
        size, v = self.kernel.sizes[0], self.config.vector
        return not isinstance(size, int) or size > self.config.most * v or not multiple(size, v)

    def threads(self) -> tuple[Extent, Extent, Extent]:
        """Return the number of threads in each direction."""
        sizes, order = self.kernel.sizes, self.config.order
        x = parts(sizes[order[0]], self.config.vector) if order else 1
        x = apply("Min", x, self.config.most) if self.strides() else x
        y = sizes[order[1]] if len(order) > 1 else 1
        return x, y, product(sizes[a] for a in order[2:])

    def positions(self, vector: int, x: str = "at.x", y: str = "at.y", z: str = "at.z") -> None:
        """Define the axes of P from the thread positions `x`, `y` and `z`, in the order of the configuration."""
        order, integer = self.config.order, self.integer
        used = self._used_axes()
        for axis, text in zip(order[:2], (x, y), strict=False):
            name = self.where[axis] = self.axis_name(axis)
            if axis in used:
                self.put(
                    f"const {integer} {name} = {integer}({text}){f' * {vector}' if vector > 1 and axis == order[0] else ''};"
                )
        self._rest(order[2:], z)

    def _rest(self, axes: Sequence[int], z: str) -> None:
        """Define the axes that share the third direction, from the innermost to the outermost."""
        unsigned = "ulong" if self.variant.wide else "uint"
        inner: Extent = 1
        for k, axis in enumerate(axes):
            name = self.where[axis] = self.axis_name(axis)
            text = z if inner == 1 else f"{unsigned}({z}) / {unsigned}({self.address.divisor(inner)})"
            if k < len(axes) - 1:
                text = f"{text} % {unsigned}({self.address.divisor(self.kernel.sizes[axis])})"
            if axis in self._used_axes():
                self.put(f"const {self.integer} {name} = {self.integer}({text});")
            inner = inner * self.kernel.sizes[axis]

    def _used_axes(self) -> frozenset[int]:
        return frozenset().union(*(n.index.axes() for n in self.nodes.values() if n.index is not None))

    def _strided(self, nodes: Sequence[object]) -> None:
        """Emit a grid-stride loop along the only axis; a remainder smaller than a vector is computed one by one."""
        v, size, name = self.config.vector, self.address.extent(self.kernel.sizes[0]), self.axis_name(0)
        integer, body = self.integer, [n for s in self.kernel.stages for n in s.nodes]
        self.where[0] = name
        by = f"{integer}(grid.x)" + (f" * {v}" if v > 1 else "")
        start = f"{integer}(at.x)" + (f" * {v}" if v > 1 else "")
        if v == 1 or multiple(self.kernel.sizes[0], v):
            with self.block(f"for ({integer} {name} = {start}; {name} < {size}; {name} += {by})"):
                self.where[0] = name
                self.cell(body, over_row=False, vector=v)
            return
        with self.block(f"for ({integer} base = {start}; base < {size}; base += {by})"):
            with self.block(f"if (base + {v} <= {size})"):
                self.put(f"const {integer} {name} = base;")
                self.where[0] = name
                self.cell(body, over_row=False, vector=v)
            with self.block("else"):
                with self.block(f"for ({integer} {name} = base; {name} < {size}; {name}++)"):
                    self.where[0] = name
                    self.cell(body, over_row=False, vector=1)

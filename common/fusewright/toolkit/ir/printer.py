"""Kernels as text, one line per value:

kernel softmax(x: f32 in, y: f32 out; s0) over p0<s0> x r0<768>
  row:
    %0: f32 = load x[768*p0 + r0]
    %1: f32 = reduce.max %0
"""

from __future__ import annotations

from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.index import Coefs, Index
from fusewright.toolkit.ir.ir import Kernel, Node


def to_text(kernel: Kernel) -> str:
    """Print the kernel. Equal text (names aside) means equal kernels."""
    params = [f"{b.name}: {b.dtype} {b.access}" for b in kernel.buffers]
    params += [f"{s.name}: {s.dtype}" for s in kernel.scalars]
    head = ", ".join(params) + (f"; {', '.join(f's{k}' for k in kernel.symbols)}" if kernel.symbols else "")
    names = axis_names(kernel)
    domain = " x ".join(f"{n}<{s}>" for n, s in zip(names, kernel.sizes, strict=True)) or "one point"
    lines = [f"kernel {kernel.name}({head}) over {domain}"]
    for s in kernel.stages:
        lines.append("  point:" if s.over == "P" else "  row:")
        lines.extend(f"    {node_text(kernel, n, names)}" for n in s.nodes)
    return "\n".join(lines)


def axis_names(kernel: Kernel) -> list[str]:
    """p0, p1, ..., r0, ..."""
    return [f"p{i}" for i in range(len(kernel.p))] + [f"r{i}" for i in range(len(kernel.r))]


def node_text(kernel: Kernel, n: Node, names: list[str] | None = None) -> str:
    """One node as a line."""
    axes = names or axis_names(kernel)
    args = ", ".join(f"%{a}" for a in n.args)
    where = "" if n.index is None else index_text(n.index, axes)
    if n.op == "store" and n.buffer is not None:
        mask = f" if %{n.args[1]}" if len(n.args) > 1 else ""
        return f"{kernel.buffers[n.buffer].name}[{where}] {n.how}= %{n.args[0]}{mask}"
    if n.op == "load" and n.buffer is not None:
        mask = f" if %{n.args[0]} else %{n.args[1]}" if n.args else ""
        body = f"load {kernel.buffers[n.buffer].name}[{where}]{mask}"
    elif n.op == "const":
        body = f"const {n.value}"
    elif n.op == "scalar":
        body = f"scalar {kernel.scalars[int(n.value or 0)].name}"
    elif n.op == "index":
        body = f"index {where}"
    elif n.op == "bound":
        body = f"bound{'.wrap' if n.how else ''} {args} < {n.extent}{f' or {n.says!r}' if n.says else ''}"
    else:
        body = f"{n.op}{'.' + n.how if n.how else ''} {args}"
    return f"%{n.id}: {n.dtype} = {body}{' keep' if n.keep else ''}"


def index_text(index: Index, axes: list[str]) -> str:
    """An index expression, e.g. `768*p0 + r0 + 64*((p1 // 4) % 8) + 2*%7`."""
    parts = [_scaled(c, axes[a]) for a, c in index.coefs]
    for d in index.divmods:
        body = f"({_affine(d.offset, d.coefs, axes)} // {_wrap(d.div)})"
        parts.append(_scaled(d.stride, f"({body} % {_wrap(d.mod)})" if d.mod is not None else body))
    parts += [_scaled(i.stride, f"%{i.value}") for i in index.indirect]
    if index.offset != 0 or not parts:
        parts.append(str(index.offset))
    return " + ".join(parts)


def _affine(offset: Extent, coefs: Coefs, axes: list[str]) -> str:
    parts = [_scaled(c, axes[a]) for a, c in coefs] + ([str(offset)] if offset != 0 or not coefs else [])
    return parts[0] if len(parts) == 1 and "*" not in parts[0] else f"({' + '.join(parts)})"


def _scaled(k: Extent, what: str) -> str:
    return what if k == 1 else f"{_wrap(k)}*{what}"


def _wrap(e: Extent) -> str:
    text = str(e)
    return f"({text})" if "+" in text or "-" in text[1:] else text

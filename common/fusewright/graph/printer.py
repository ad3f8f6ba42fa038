"""The graph as text: one line per node, `%3: f32[8,128] = linear(%1, %2, None)  # model.py:41`. `parser` reads it back."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from fusewright import ops
from fusewright.graph.spec import contiguous_strides, device_text, extent, value_of
from fusewright.graph.view import is_op, qualified_name, source_line
from fusewright.interface import HOST
from fusewright.sizes.expr import Extent
from fusewright.storage import lazy

SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.bool: "bool",
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def dtype_name(dtype: torch.dtype) -> str:
    return SHORT.get(dtype, str(dtype).removeprefix("torch."))


def type_text(val: Any) -> str:
    """Format the type of a value: `f32[2,3]`, with `{strides}` if not contiguous, `~neg` (etc.) if lazy, and `@device` if not
    on the host."""
    if isinstance(val, torch.Tensor):
        shape = [*map(extent, val.shape)]
        text = f"{dtype_name(val.dtype)}[{','.join(map(str, shape))}]"
        if val.layout is torch.strided and not _is_contiguous(shape, stride := [*map(extent, val.stride())]):
            text += "{" + ",".join(map(str, stride)) + "}"
        text = f"{text}~{found}" if (found := lazy(val)) else text
        device = device_text(val.device).removesuffix(":0")
        return text if device == HOST else f"{text}@{device}"
    if isinstance(val, torch.SymInt):
        return f"sym({extent(val)})"
    if isinstance(val, tuple | list):
        return "(" + ", ".join(type_text(v) for v in val) + ")"
    return "none" if val is None else type(val).__name__


def _is_contiguous(shape: Sequence[Extent], stride: Sequence[Extent]) -> bool:
    return all(n == 1 or s == e for n, s, e in zip(shape, stride, contiguous_strides(shape), strict=True))


def _arg(a: Any, number: dict[Node, int]) -> str:
    if isinstance(a, Node):
        return f"%{number[a]}"
    if isinstance(a, tuple | list):
        return "[" + ", ".join(_arg(x, number) for x in a) + "]"
    return repr(a) if isinstance(a, str) else str(a)


def _name(node: Node) -> str:
    if not is_op(node):
        return f"py.{getattr(node.target, '__name__', node.target)}"
    row = ops.find(node.target)
    return row.name if row else qualified_name(node.target).replace("::", ".")


def to_text(graph: Graph, sources: bool = True, const: Collection[Node] = ()) -> str:
    """Print every node in order, with a mark on those in `const`. Numbers are positions, so equal graphs print the same."""
    number = {n: i for i, n in enumerate(graph.nodes)}
    lines = []
    for node, i in number.items():
        if node.op == "output":
            lines.append(f"return {_arg(node.args[0], number)}")
            continue
        left = f"%{i}: {type_text(value_of(node))}"
        if node.op in ("placeholder", "get_attr"):
            kind = "input" if node.op == "placeholder" else "attribute"
            lines.append(f"{left} = {kind}({node.target!r}){'  # const' * (node in const)}")
            continue
        args = [_arg(a, number) for a in node.args] + [f"{k}={_arg(v, number)}" for k, v in node.kwargs.items()]
        said = [s for s in (source_line(node) if sources else "", "const" if node in const else "") if s]
        lines.append(f"{left} = {_name(node)}({', '.join(args)})" + (f"  # {', '.join(said)}" if said else ""))
    return "\n".join(lines) + "\n"

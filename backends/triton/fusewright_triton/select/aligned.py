"""Rows of odd length: zeros behind the features of a linear, written by the kernel that makes its input and, for constants, once;
and behind the rows of other products.

Libraries' fast kernels, and tensor descriptors, read and write vectors of 16 bytes. Others take several times as long. Zeros go
behind the features of both operands, so that they add nothing, whatever the operands hold. Results have rows too: those of odd
length are computed with columns behind them, and what reads them in place, or one copy, leaves these out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusewright import machine
from fusewright.interface import OpView, TensorSpec, Value
from fusewright.plan.ir import Call, Ref
from fusewright.toolkit.backend.candidates import Thunk
from fusewright.toolkit.lower.tables import RULES
from fusewright.toolkit.region.graph import spec_of
from fusewright.toolkit.region.pattern import Match, chain
from fusewright.toolkit.region.rewrite import Row
from fusewright_triton.run.graphs import REPEATS
from fusewright_triton.select.calls import Calls

PADDED_TO = 8
"""Row lengths in a half type that are multiples of this suit the tensor memory accelerator and 16-byte loads."""

HALF = (torch.bfloat16, torch.float16)

FEW = 8
"""The longest sum of a product that suits a loop kernel better than any library."""


def vector(dtype: torch.dtype) -> int:
    """Return how many elements libraries' fast kernels read at once; 1 where they have none, as for fp32 in full precision."""
    if dtype is torch.float32 and machine.matmul_precision("cuda") != "ieee":
        return PADDED_TO // 2
    return PADDED_TO if dtype in HALF else 1


def lacking(op: OpView, c: Calls) -> tuple[int, int]:
    """Return how many features and results a linear of fixed sizes lacks, where zeros pay: one of its matrices is large, the weight
    only if it is padded once."""
    x, w, out = (spec_of(v) for v in (op.arg("input"), op.arg("weight"), op.out))
    if not (x.static and out.static) or 0 in out.shape or 1 in (out.shape[-1], out.numel_hint() // out.shape[-1]):  # type: ignore[operator]
        return 0, 0  # empty, or a vector, which libraries multiply by rows of any length
    weights = w.numel_hint() if c.is_const(op.arg("weight"), op.arg("bias")) else 0
    if max(x.numel_hint(), out.numel_hint(), weights) < c.target.bounds.padded_results:
        return 0, 0
    step = vector(out.dtype)
    return -x.shape[-1] % step, -out.shape[-1] % step  # type: ignore[operator]


def operands(op: OpView, c: Calls, more: int = 0) -> tuple[Ref | None, Ref, Ref | None]:
    """Return input, weight and bias of a linear, with zeros behind the features it lacks, and for `more` results."""
    w, bias, behind = op.arg("weight"), op.arg("bias"), lacking(op, c)[0]
    constant = c.is_const(w, bias)
    make = c.b.prepare if constant else partial(each_call, c)
    weight, added = c.b.exact(w) if constant else enlarged(w, more, behind, c), c.exact(bias)
    if constant and (behind or more):
        weight = make("aten::constant_pad_nd.default", weight, (0, behind, 0, more), 0)
    if more and added is not None:
        added = make("aten::constant_pad_nd.default", added, (0, more), 0)
    return rows(op.arg("input"), behind, c), weight, added


def each_call(c: Calls, target: str, *args: Any) -> Ref:
    """Compute at every call what `Builder.prepare` would compute once: weights change in training."""
    return c.made(target, *args)


def rows(x: Value, behind: int, c: Calls) -> Ref | None:
    """Return a tensor with zeros behind its rows. Products of one tensor share it, and kernels read it in place of the tensor."""
    if not behind:
        return c.b.any_strides(x)
    key = x.id, 0, behind
    if key not in c.padded:
        c.padded[key] = c.b.append_op("constant_pad_nd", x, (0, behind), 0)
        if _only_a_kernel_makes(x, c):
            c.b.moved(x, c.b.append_op("slice", c.padded[key], -1, 0, spec_of(x).shape[-1], 1))
    return Ref(c.b.read_instead(x, c.padded[key]).id)


def _only_a_kernel_makes(x: Value, c: Calls) -> bool:
    """Return whether nobody needs a tensor that a kernel makes without those zeros."""
    made = c.graph.producer(x)
    by_kernel = made is not None and made.op in RULES and c.graph.free(made) and not c.graph.escapes(x)
    return by_kernel and all(map(c.b.takes_any_strides, c.graph.users(x)))


MATRICES = {"mm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "bmm": ("self", "mat2"), "baddbmm": ("batch1", "batch2")}
"""Products other than linears, and the names of their factors."""

COPY = 3e-6
"""Seconds of the shortest copy beside a product."""

SCORES = 8
"""The most ops between a product and a softmax of it."""


@dataclass(frozen=True)
class Sizes:
    """A batch of products, M x K by K x N; the elements that would be copied, and in how many copies; whether a row is `odd`."""

    batch: int
    m: int
    k: int
    n: int
    copied: int
    copies: int
    odd: bool = True

    def seconds(self, dtype: torch.dtype, c: Calls) -> tuple[float, float, float]:
        """Return about how long a library takes for rows of any length and for whole vectors, and copies."""
        by, bytes_ = c.target.bounds, dtype.itemsize
        work = self.batch * self.m * self.n * self.k * bytes_  # 2 operations each; fp32 on matrix units has half the speed
        moved = self.batch * (self.m * self.k + self.k * self.n + self.m * self.n) * bytes_ / by.bandwidth
        copies = 2 * self.copied * bytes_ / by.bandwidth
        return max(work / by.unaligned_flops[not self.odd], moved), max(work / by.library_flops, moved), copies


def pays(s: Sizes, dtype: torch.dtype, c: Calls) -> bool:
    """Return whether copies with zeros cost less than a library's kernel for any rows: a formula of sizes on targets where it was
    fitted, elsewhere the least size for which a measurement is worth while."""
    if c.target.fitted is None:
        return s.batch * max(s.m * s.k, s.k * s.n, s.m * s.n) >= c.target.bounds.padded_results
    unaligned, aligned, copies = s.seconds(dtype, c)
    return unaligned - aligned > copies + COPY * s.copies


def linear_pays(op: OpView, c: Calls) -> bool:
    """Return whether a linear is padded. In inference of weights that are copied at each call the whole formula must say so; else
    copies must not take longer than the product as it is, which small ones exceed by far."""
    x, w, out = (spec_of(v) for v in (op.arg("input"), op.arg("weight"), op.out))
    n, k = map(int, w.shape)  # type: ignore[arg-type]
    behind, more = lacking(op, c)
    constant = c.is_const(op.arg("weight"), op.arg("bias"))
    parts = [x.numel_hint() * (behind > 0 and not _only_a_kernel_makes(op.arg("input"), c)), w.numel_hint() * (not constant)]
    parts.append(out.numel_hint() * (more > 0 and not _read_in_place(op.out, c)))
    sizes = Sizes(1, out.numel_hint() // n, k, n, sum(parts), sum(map(bool, parts)), (behind | more) % 2 > 0)
    if not constant and c.graph.phase == "infer":
        return pays(sizes, out.dtype, c)
    unaligned, _, copies = sizes.seconds(out.dtype, c)
    return c.target.fitted is None or copies <= unaligned


def rows_reason(op: OpView) -> str | None:
    """Return why a product of matrices keeps its rows."""
    left, right = (spec_of(op.arg(name)) for name in MATRICES[op.op])
    if not (left.static and right.static) or 0 in (*left.shape, *right.shape) or left.dtype != right.dtype:
        return "symbolic, empty or of mixed types"
    if 1 in (left.shape[-2], right.shape[-1]):
        return "a vector: libraries multiply it by rows of any length"
    if not (_dense(left) and _dense(right)):
        return "matrices that torch copies"
    return None if any(_lacks(op)) or _apart(left) or _apart(right) else "rows that suit libraries' kernels"


def _dense(s: TensorSpec) -> bool:
    """Return whether the elements of rows, or of columns, are next to each other, and rows do not overlap."""
    lengths = zip(s.stride[-2:], s.shape[:-3:-1], strict=True)
    return 1 in s.stride[-2:] and all(step == 1 or step >= size for step, size in lengths)  # type: ignore[operator]


def _by_rows(s: TensorSpec) -> bool:
    return s.stride[-1] == 1


def _apart(s: TensorSpec) -> bool:
    """Return whether rows of suitable length begin at unsuitable places, as those of a slice."""
    return _by_rows(s) and s.stride[-2] % vector(s.dtype) != 0 == s.shape[-1] % vector(s.dtype)  # type: ignore[operator]


def _lacks(op: OpView) -> tuple[int, int, int]:
    """Return how many rows, inner elements and columns a product lacks in the dims along which its matrices lie in memory."""
    left, right = (spec_of(op.arg(name)) for name in MATRICES[op.op])
    step, (m, k), n = vector(left.dtype), map(int, left.shape[-2:]), int(right.shape[-1])  # type: ignore[arg-type]
    inner = _by_rows(left) or not _by_rows(right)
    return 0 if _by_rows(left) else -m % step, -k % step if inner else 0, -n % step


def _sizes(op: OpView, c: Calls) -> Sizes:
    left, right = (op.arg(name) for name in MATRICES[op.op])
    rows, inner, columns = _lacks(op)
    out = spec_of(op.out)
    *_, m, k = map(int, spec_of(left).shape)  # type: ignore[arg-type]
    n = int(out.shape[-1])  # type: ignore[arg-type]
    parts = [spec_of(left).numel_hint() * (rows + inner > 0 or _apart(spec_of(left)))]
    parts.append(spec_of(right).numel_hint() * (inner + columns > 0 or _apart(spec_of(right))))
    if rows or columns:
        parts.append(out.numel_hint() * (not _read_in_place(op.out, c)))
        parts.append(out.numel_hint() * (op.op in ("addmm", "baddbmm") and spec_of(op.arg("self")).numel_hint() > n))
    odd = (rows | inner | columns) % 2 > 0 or any(_apart(spec_of(v)) for v in (left, right))
    return Sizes(out.numel_hint() // (m * n), m, k, n, sum(parts), sum(map(bool, parts)), odd)


def _read_in_place(value: Value, c: Calls) -> bool:
    """Return whether a result may keep columns behind its rows: all its readers are kernels."""
    users = c.graph.users(value)
    return not c.graph.escapes(value) and all(u.op in RULES and c.b.takes_any_strides(u) for u in users)


def _scores(value: Value, c: Calls, left: int = SCORES) -> bool:
    """Return whether a softmax reads a value, by way of a few ops: attention takes the product in a row of its own."""
    users = c.graph.users(value) if left else ()
    return any(u.op in ("softmax", "sdpa") or any(_scores(o, c, left - 1) for o in u.outs) for u in users)


def _rows_pay(m: Match, c: Calls) -> bool:
    op = m.anchor
    left, right = (spec_of(op.arg(name)) for name in MATRICES[op.op])
    if rows_reason(op) is not None or not pays(_sizes(op, c), left.dtype, c) or (left.rank == 3 and _scores(op.out, c)):
        return False
    sizes = " ".join(f"{list(s.shape)}{list(s.stride)}" for s in (left, right))
    key = f"padded operands {str(left.dtype).removeprefix('torch.')} {sizes}"
    return c.pays(key, partial(_products, (left, right), (0, 0, 0)), partial(_products, (left, right), _lacks(op)))


def _with_padded_rows(m: Match, c: Calls) -> None:
    """Emit the product of operands padded with zeros: the fast kernels want suitable sizes as well as strides."""
    op, b, out = m.anchor, c.b, spec_of(m.anchor.out)
    left, right = (op.arg(name) for name in MATRICES[op.op])
    rows, inner, columns = _lacks(op)
    given, more = [enlarged(left, rows, inner, c), enlarged(right, inner, columns, c)], tuple[tuple[str, Any], ...]()
    if op.op in ("addmm", "baddbmm"):
        given.insert(0, _summand(op.arg("self"), out, rows, columns, c))
        more = tuple((name, op.arg(name)) for name in ("beta", "alpha"))
    made = c.ctx.value(None) if rows or columns else op.out
    b.append(Call(op.target, tuple(given), (made.id,), more, op_id=op.id))
    *_, m_, n = map(int, out.shape)  # type: ignore[arg-type]
    stride = ((m_ + rows) * (n + columns), n + columns, 1)[-out.rank :]
    if rows and columns:
        made, whole = c.ctx.value(None), made
        b.call("aten::slice.Tensor", Ref(whole.id), -2, 0, m_, out=made)
    if rows or columns:
        dim, size = (-1, n) if columns else (-2, m_)
        b.library("aten::slice.Tensor", Ref(made.id), dim, 0, size, out=op.out, stride=stride, op=op)


def _summand(value: Value, out: TensorSpec, rows: int, columns: int, c: Calls) -> Ref:
    """Return what is added to a product, for a larger one: with zeros where it is not repeated."""
    shape = spec_of(value).shape
    behind = columns if shape and shape[-1] == out.shape[-1] else 0
    below = rows if len(shape) > 1 and shape[-2] == out.shape[-2] else 0
    if not behind and not below:
        return c.b.exact(value)
    return Ref(c.b.append_op("constant_pad_nd", value, (0, behind, 0, below)[: 2 * min(len(shape), 2)], 0).id)


def enlarged(value: Value, rows: int, columns: int, c: Calls) -> Ref:
    """Return matrices padded with rows and columns of zeros; if columns are dense, by padding the matrices that they transpose.
    Products of one tensor share the copy."""
    if not rows and not columns:
        return Ref(c.b.row_major(value).id) if _apart(spec_of(value)) else c.b.exact(value)
    if not _by_rows(spec_of(value)):
        return each_call(c, "aten::transpose.int", enlarged(_transposed(value, c), columns, rows, c), -2, -1)
    key = value.id, rows, columns
    if key not in c.padded:
        c.padded[key] = c.b.append_op("constant_pad_nd", value, (0, columns, 0, rows), 0)
    return Ref(c.padded[key].id)


def _transposed(value: Value, c: Calls) -> Value:
    """Return the matrices that `value` transposes, or emit an op that makes them."""
    spec, made = spec_of(value), c.graph.producer(value)

    def turned(sizes: Sequence[Any]) -> tuple[Any, ...]:
        return (*sizes[:-2], sizes[-1], sizes[-2])

    if made is not None and made.op in ("t", "transpose", "permute"):
        base = next(iter(made.inputs()))
        if spec_of(base).shape == turned(spec.shape) and spec_of(base).stride == turned(spec.stride):
            return base
    return c.b.append_op("transpose", value, -2, -1)


def _products(specs: Sequence[TensorSpec], more: tuple[int, int, int]) -> Thunk:
    """Time a product of matrices, padded by so many rows, inner elements and columns, and the copy of the wanted part."""
    a, b = (torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device).fill_(0.5) for s in specs)  # type: ignore[arg-type]
    rows, inner, columns = more
    m, n = a.shape[-2], b.shape[-1]

    def run() -> None:
        for _ in range(REPEATS):
            out = torch.matmul(_with_zeros(a, rows, inner), _with_zeros(b, inner, columns))
            if rows or columns:
                out[..., :m, :n].contiguous()
        torch.cuda.synchronize(a.device)

    return run


def _with_zeros(t: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if not rows and not columns:
        return t
    pad = torch.nn.functional.pad
    return pad(t, (0, columns, 0, rows)) if t.stride(-1) == 1 else pad(t.mT, (0, rows, 0, columns)).mT


ROWS = Row(
    "triton.product.padded_rows", chain(tuple(MATRICES)), when=_rows_pay, write=_with_padded_rows,
    note="product, of padded rows",
)  # fmt: skip
"""A product of rows that suit no fast kernel, where copies to padded rows cost less."""

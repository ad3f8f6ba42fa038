"""Shape rules: small named functions from a call to the shapes of its outputs.

Factories take argument names of the op's schema (their parameters end in an underscore). Sizes may be SymInts; a rule never
compares a symbolic size, because that would add a guard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright.ops.core import Args, Shape, ShapeRule
from fusewright.ops.rules import is_one, masked_by, named, tensors, times, wrap


def shape(t: Any) -> Shape:
    """Return the sizes, with symbols that tracing has fixed replaced by their numbers."""
    return tuple(compat.settled_size(n) for n in t.shape)


def shape_of(arg_: str, outputs: int = 1) -> ShapeRule:
    """The shape of one argument, for every output."""
    return named(lambda a: (shape(next(tensors(a[arg_]))),) * outputs, f"shape_of({arg_})" + times(outputs))


def shapes(*parts: ShapeRule) -> ShapeRule:
    """One rule per output, side by side."""
    return named(lambda a: tuple(s for p in parts for s in p(a)), ", ".join(p.__name__ for p in parts))


def broadcast_shapes(items: Sequence[Shape]) -> Shape:
    """NumPy broadcasting. A size that is not known to be one wins; a known size wins over a symbol."""
    rank = max((len(s) for s in items), default=0)
    out: list[Any] = [1] * rank
    for s in items:
        for i, n in enumerate(s, start=rank - len(s)):
            if is_one(out[i]) or (isinstance(n, int) and n != 1):
                out[i] = n
    return tuple(out)


def broadcast(*args_: str) -> ShapeRule:
    """These arguments broadcast together; numbers and absent ones do not count."""

    def rule(a: Args) -> tuple[Shape]:
        return (broadcast_shapes([shape(t) for n in args_ for t in tensors(a[n])]),)

    return named(rule, f"broadcast({', '.join(args_)})")


SAME = shape_of("self")
SAME_INPUT = shape_of("input")
BROADCAST = broadcast("self", "other")


def scalar_shape(a: Args) -> tuple[Shape]:
    """0-dim."""
    return ((),)


def attr_shape(arg_: str = "size") -> ShapeRule:
    """The sizes that an argument lists."""
    return named(lambda a: (tuple(a[arg_]),), arg_)


def attr_sizes(*args_: str) -> ShapeRule:
    """One size per argument."""
    return named(lambda a: (tuple(a[n] for n in args_),), f"[{', '.join(args_)}]")


def constant_shape(*shapes_: Shape) -> ShapeRule:
    """Always these shapes."""
    return named(lambda a: shapes_, ", ".join(str(list(s)) for s in shapes_))


def drop_dims(s: Shape, dim: Any, keepdim: bool) -> Shape:
    """`s` reduced over `dim`: an int, a list, or None or [] for all."""
    listed = [dim] if isinstance(dim, int) else list(dim or [])
    gone = {wrap(d, len(s)) for d in listed} if listed else set(range(len(s)))
    return tuple(1 if i in gone else n for i, n in enumerate(s) if keepdim or i not in gone)


def reduced(outputs: int = 1) -> ShapeRule:
    """`self` without the dimensions of `dim`, or with ones there when `keepdim`."""

    def rule(a: Args) -> tuple[Shape, ...]:
        return (drop_dims(shape(a["self"]), a["dim"], a["keepdim"]),) * outputs

    return named(rule, "reduced" + times(outputs))


def all_any_dims(a: Args) -> tuple[Shape]:
    """As `reduced`, but an empty `dim` reduces nothing (ATen any.dims and all.dims)."""
    s = shape(a["self"])
    return (s if a["dim"] is not None and len(a["dim"]) == 0 else drop_dims(s, a["dim"], a["keepdim"]),)


def mm(a: Args) -> tuple[Shape]:
    """[n, k] x [k, m] -> [n, m]."""
    x, y = _pair(a)
    return ((x[0], y[1]),)


def bmm(a: Args) -> tuple[Shape]:
    """[b, n, k] x [b, k, m] -> [b, n, m]."""
    x, y = _pair(a)
    return ((x[0], x[1], y[2]),)


def bmm_sum(a: Args) -> tuple[Shape]:
    """[b, n, k] x [b, k, m] -> [n, m]."""
    return (bmm(a)[0][1:],)


def _pair(a: Args) -> tuple[Shape, Shape]:
    for left, right in (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2")):
        if left in a and right in a:
            return shape(a[left]), shape(a[right])
    raise KeyError("no pair of matrices among the arguments")


def matvec(a: Args) -> tuple[Shape]:
    """[n, k] x [k] -> [n]."""
    return (shape(a["self" if "vec" in a and "mat" not in a else "mat"])[:1],)


def matmul(a: Args) -> tuple[Shape]:
    """Batched matrix product; a vector on either side loses its dimension; batch dimensions broadcast."""
    x, y = shape(a["self"]), shape(a["other"])
    rows = x[-2:-1] if len(x) > 1 else ()
    cols = y[-1:] if len(y) > 1 else ()
    return (broadcast_shapes([x[:-2], y[:-2]]) + rows + cols,)


def linear(a: Args) -> tuple[Shape]:
    """[..., k] x [n, k] -> [..., n]; a weight of one dimension gives [...]."""
    return (shape(a["input"])[:-1] + shape(a["weight"])[:-1],)


def conv(a: Args) -> tuple[Shape]:
    """[n, c, ...] x [k, c / groups, ...] -> [n, k, ...]; transposed weights are [c, k / groups, ...]. Without input channels
    torch makes a result without channels."""
    x, w = shape(a["input"]), shape(a["weight"])
    lead = x[: len(x) - (len(w) - 2) - 1]
    spatial = []
    for i, (n, k) in enumerate(zip(x[len(lead) + 1 :], w[2:], strict=True)):
        s, p, d, extra = (_at(a[f], i) for f in ("stride", "padding", "dilation", "output_padding"))
        if a["transposed"]:
            spatial.append((n - 1) * s - 2 * p + d * (k - 1) + extra + 1)
        else:
            spatial.append((n + 2 * p - d * (k - 1) - 1) // s + 1)
    channels = w[1] * a["groups"] if a["transposed"] else w[0]
    return ((*lead, 0 if isinstance(x[len(lead)], int) and x[len(lead)] == 0 else channels, *spatial),)


def _at(values: Sequence[Any], i: int) -> Any:
    return values[i] if len(values) > 1 else values[0]


def pooled(outputs: int, spatial: int) -> ShapeRule:
    """Windows over the last `spatial` dimensions. The stride defaults to the kernel size; ceil mode drops
    windows that would start in the padding."""

    def rule(a: Args) -> tuple[Shape, ...]:
        x = shape(a["self"])
        sizes = [_window(a, n, i) for i, n in enumerate(x[-spatial:])]
        return ((*x[:-spatial], *sizes),) * outputs

    return named(rule, f"pooled{spatial}d" + times(outputs))


def _window(a: Args, n: Any, i: int) -> Any:
    k, p = _at(a["kernel_size"], i), _at(a["padding"], i)
    s = _at(a["stride"], i) if a["stride"] else k
    d = _at(a["dilation"], i) if "dilation" in a else 1
    span = n + 2 * p - d * (k - 1) - 1
    if not a["ceil_mode"]:
        return span // s + 1
    out = (span + s - 1) // s + 1
    return out - 1 if (out - 1) * s >= n + p else out


def columns(a: Args) -> tuple[Shape]:
    """[..., c, h, w] -> [..., c * elements of a window, windows]."""
    *lead, c, h, w = shape(a["self"])
    windows = [
        (n + 2 * _at(a["padding"], i) - _at(a["dilation"], i) * (_at(a["kernel_size"], i) - 1) - 1) // _at(a["stride"], i) + 1
        for i, n in enumerate((h, w))
    ]
    return ((*lead, c * _elements(a), windows[0] * windows[1]),)


def from_columns(a: Args) -> tuple[Shape]:
    """[..., c * elements of a window, windows] -> [..., c, *output_size]."""
    *lead, c, _ = shape(a["self"])
    return ((*lead, c // _elements(a), *a["output_size"]),)


def _elements(a: Args) -> Any:
    return _at(a["kernel_size"], 0) * _at(a["kernel_size"], 1)


def resized(spatial: int) -> ShapeRule:
    """`output_size` in place of the last `spatial` dimensions."""
    return named(lambda a: ((*shape(a["self"])[:-spatial], *a["output_size"]),), f"resized{spatial}d")


def viewed(a: Args) -> tuple[Shape]:
    """The listed sizes, where -1 stands for the remaining size."""
    s, size = shape(a["self"]), tuple(a["size" if "size" in a else "shape"])
    known = [n for n in size if not (isinstance(n, int) and n == -1)]
    if len(known) == len(size):
        return (size,)
    rest = math.prod(s) // math.prod(known) if known else math.prod(s)
    return (tuple(rest if isinstance(n, int) and n == -1 else n for n in size),)


def expanded(a: Args) -> tuple[Shape]:
    """The listed sizes, where -1 keeps the existing size."""
    s, size = shape(a["self"]), tuple(a["size"])
    old = (None,) * (len(size) - len(s)) + s
    return (tuple(o if isinstance(n, int) and n == -1 else n for o, n in zip(old, size, strict=True)),)


def permuted(a: Args) -> tuple[Shape]:
    """The dimensions in the listed order."""
    s = shape(a["self"])
    return (tuple(s[d] for d in a["dims"]),)


def transposed(a: Args) -> tuple[Shape]:
    """Two dimensions swapped."""
    s = list(a["self"].shape)
    if s:
        i, j = a["dim0"], a["dim1"]
        s[i], s[j] = s[j], s[i]
    return (tuple(s),)


def reversed_dims(a: Args) -> tuple[Shape]:
    """The dimensions in reverse."""
    return (shape(a["self"])[::-1],)


def squeezed(a: Args) -> tuple[Shape]:
    """Without the listed dimensions whose size is one."""
    s = shape(a["self"])
    dims = {wrap(d, len(s)) for d in a["dim"]}
    return (tuple(n for i, n in enumerate(s) if not (i in dims and is_one(n))),)


def unsqueezed(a: Args) -> tuple[Shape]:
    """With a size of one at `dim`."""
    s = shape(a["self"])
    d = wrap(a["dim"], len(s) + 1)
    return ((*s[:d], 1, *s[d:]),)


def replace(s: Shape, dim: int, size: Any) -> Shape:
    """`s` with another size at `dim`."""
    d = wrap(dim, len(s))
    return (*s[:d], size, *s[d + 1 :])


def slice_length(n: Any, start: Any, end: Any, step: Any) -> Any:
    """Return how many of `n` elements `start:end:step` selects. Symbols are clamped by min and max expressions."""
    if isinstance(start, int) and isinstance(end, int) and end <= start and (start < 0) == (end < 0):
        return 0
    start = _clamp(0 if start is None else start, n)
    end = n if end is None or (isinstance(end, int) and end >= 2**63 - 1) else _clamp(end, n)
    if all(isinstance(v, int) for v in (n, start, end, step)):
        return max(0, -((start - end) // step))
    length = end - start if is_one(step) else (end - start + step - 1) // step
    traced = compat.traced_size(length)
    return 0 if traced is not None and traced < 0 else length  # tracing has guarded that the slice is empty


def _clamp(i: Any, n: Any) -> Any:
    """Clamp `i` to an index into `n` elements; where symbols are undecided, use what tracing has guarded."""
    if compat.statically_true(i < 0):
        i = _at_least_0(n + i)
    if isinstance(i, int) and isinstance(n, int):
        return min(i, n)
    return i if compat.statically_true(i <= n) else torch.sym_min(i, n)


def _at_least_0(i: Any) -> Any:
    if isinstance(i, int):
        return max(i, 0)
    if compat.statically_true(i >= 0):
        return i
    return 0 if compat.statically_true(i <= 0) else torch.sym_max(i, 0)


def sliced(a: Args) -> tuple[Shape]:
    """`dim` cut to start:end:step."""
    s, d = shape(a["self"]), a["dim"]
    return (replace(s, d, slice_length(s[d], a["start"], a["end"], a["step"])),)


def without_dim(a: Args) -> tuple[Shape]:
    """Without `dim`."""
    s = shape(a["self"])
    d = wrap(a["dim"], len(s))
    return (s[:d] + s[d + 1 :],)


def diagonal(a: Args) -> tuple[Shape]:
    """Without the two dimensions, with the diagonal's length at the end."""
    s, k = shape(a["self"]), a["offset"]
    i, j = wrap(a["dim1"], len(s)), wrap(a["dim2"], len(s))
    rows, cols = (s[i], s[j] - k) if k >= 0 else (s[i] + k, s[j])
    static = isinstance(rows, int) and isinstance(cols, int)
    length = max(0, min(rows, cols)) if static else torch.sym_min(rows, cols)
    return ((*(n for d, n in enumerate(s) if d not in (i, j)), length),)


def unfolded(a: Args) -> tuple[Shape]:
    """`dim` becomes the number of windows; the window is the last dimension."""
    s, d = shape(a["self"]), a["dimension"]
    if not s:
        return ((a["size"],),)
    return ((*replace(s, d, (s[d] - a["size"]) // a["step"] + 1), a["size"]),)


def split_sizes(a: Args) -> tuple[Shape, ...]:
    """One output per listed size along `dim`."""
    return tuple(replace(shape(a["self"]), a["dim"], n) for n in a["split_sizes"])


def split_even(a: Args) -> tuple[Shape, ...]:
    """Outputs of `split_size` along `dim`; the last may be smaller. Tracing fixes their number by a guard."""
    s, d, k = shape(a["self"]), a["dim"], a["split_size"]
    n = s[d]
    if isinstance(k, int) and k == 0:
        return (s,)
    count = compat.traced_size(-(-n // k))
    if count is None:
        return ()
    last = max(1, count) - 1
    return (*[replace(s, d, k)] * last, replace(s, d, n - last * k))


def unbound(a: Args) -> tuple[Shape, ...]:
    """One output per index of `dim`."""
    return without_dim(a) * (compat.traced_size(a["self"].shape[a["dim"]]) or 0)


def concatenated(a: Args) -> tuple[Shape]:
    """Sizes added along `dim`; 1-dim empty tensors do not count (ATen cat)."""
    every = [shape(t) for t in a["tensors"]]
    items = [s for s in every if not (len(s) == 1 and isinstance(s[0], int) and s[0] == 0)] or every
    return (replace(items[0], a["dim"], sum(s[a["dim"]] for s in items)),)


def stacked(a: Args) -> tuple[Shape]:
    """A new dimension at `dim`, one entry per tensor."""
    s = shape(a["tensors"][0])
    d = wrap(a["dim"], len(s) + 1)
    return ((*s[:d], len(a["tensors"]), *s[d:]),)


def padded(arg_: str) -> ShapeRule:
    """An argument lists (before, after) from the last dimension on."""

    def rule(a: Args) -> tuple[Shape]:
        s, pad = list(a["self"].shape), a[arg_]
        for i in range(len(pad) // 2):
            s[-1 - i] = s[-1 - i] + pad[2 * i] + pad[2 * i + 1]
        return (tuple(s),)

    return named(rule, f"padded({arg_})")


def repeated(a: Args) -> tuple[Shape]:
    """Every size times its repeat count; missing leading sizes are one."""
    s, r = shape(a["self"]), a["repeats"]
    return (tuple(n * k for n, k in zip((1,) * (len(r) - len(s)) + s, r, strict=True)),)


def embedded(a: Args) -> tuple[Shape]:
    """[n, d] at indices [...] -> [..., d]."""
    return (shape(a["indices"]) + shape(a["weight"])[1:],)


def index_selected(a: Args) -> tuple[Shape]:
    """`dim` gets the length of the index."""
    s, index = shape(a["self"]), shape(a["index"])
    return (replace(s, a["dim"], index[0] if index else 1) if s else s,)


def indexed(a: Args) -> tuple[Shape | None]:
    """Advanced indexing: the shape that the indices broadcast to replaces the indexed dimensions, in front
    when those are not adjacent. None for a boolean mask, whose number of hits depends on data.
    """
    s, indices = shape(a["self"]), list(a["indices"])
    if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in indices):
        return (None,)
    hit = [i for i, t in enumerate(indices) if t is not None]
    new = broadcast_shapes([shape(indices[i]) for i in hit])
    rest = [n for i, n in enumerate(s) if i not in hit]
    at = hit[0] if hit == list(range(hit[0], hit[0] + len(hit))) else 0
    return ((*rest[:at], *new, *rest[at:]),)


def top_k(a: Args) -> tuple[Shape, Shape]:
    """`dim` cut to k, for values and indices."""
    s = shape(a["self"])
    out = replace(s, a["dim"], a["k"]) if s else s
    return out, out


def drawn(a: Args) -> tuple[Shape]:
    """`num_samples` in place of the last dimension."""
    return ((*a["self"].shape[:-1], a["num_samples"]),)


_ROUNDED = (torch.int64,) if len(torch.arange(0, 2.5, dtype=torch.int64, device="meta")) == 2 else ()
"""The dtypes of ranges whose bounds are rounded towards zero before they are counted: none from torch 2.14 on."""


def range_length(a: Args) -> tuple[Shape]:
    """ceil((end - start) / step), all rounded towards zero first where this torch does so."""
    start, end, step = a["start"], a["end"], a["step"]
    if a["dtype"] in _ROUNDED:
        start, end, step = (int(v) if isinstance(v, float) else v for v in (start, end, step))
    if all(isinstance(v, int) for v in (start, end, step)):
        return ((max(0, -((start - end) // step)),),)
    if any(isinstance(v, float) for v in (start, end, step)):
        return ((math.ceil((end - start) / step),),)
    if is_one(step):
        return ((end - start,),)
    return (((end - start + step + (1 if (compat.traced_size(step) or 1) < 0 else -1)) // step,),)


def norm_shapes(a: Args) -> tuple[Shape, Shape, Shape]:
    """The input's shape, and twice the shape of a statistic: ones in place of `normalized_shape`."""
    s, n = shape(a["input"]), len(a["normalized_shape"])
    stat = s[: len(s) - n] + (1,) * n
    return s, stat, stat


def group_norm_shapes(a: Args) -> tuple[Shape, Shape, Shape]:
    """The input's shape, and [N, groups] twice."""
    stat = (a["N"], a["group"])
    return shape(a["input"]), stat, stat


def channel_stats(a: Args) -> tuple[Shape, Shape, Shape]:
    """The input's shape, and [C] twice."""
    s = shape(a["input"])
    return s, s[1:2], s[1:2]


def masked_shapes(rule: ShapeRule) -> ShapeRule:
    """Outputs that `output_mask` turns off are absent."""
    return named(lambda a: masked_by(rule(a), a["output_mask"]), rule.__name__)

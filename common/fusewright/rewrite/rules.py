"""The host's own rules. All are exact (same bits), so they run before any claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fusewright import _torch_compat as compat
from fusewright import ops
from fusewright.graph.retrace import contiguous_like
from fusewright.graph.spec import value_of
from fusewright.graph.view import is_projection
from fusewright.rewrite import empty
from fusewright.rewrite.engine import ANY, READER, Env, Rewriter, Rule, is_call, p
from fusewright.rewrite.loops.filled import Write, copied, copies_into_piece, place
from fusewright.storage import lazy


def _shape(node: Any) -> tuple[Any, ...]:
    return tuple(value_of(node).shape)


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(compat.statically_true(x == y) for x, y in zip(a, b, strict=True))


def _same_layout(a: Node, b: Node) -> bool:
    x, y = value_of(a), value_of(b)
    if lazy(x) != lazy(y):
        return False  # the clone is what computes a negated view
    return x.dtype == y.dtype and x.device == y.device and _same(x.shape, y.shape) and _same(x.stride(), y.stride())


def _weight(w: Any) -> bool:
    return isinstance(w, Node) and value_of(w).dim() == 2


def _linear(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Rewrite addmm/mm on a transposed weight to the linear that the user wrote."""
    x, w, bias = env["x"], env["w"], env.get("bias")
    if not _weight(w) or (bias is not None and value_of(bias).dim() != 1):
        return None
    if bias is not None and value_of(bias).dtype != value_of(x).dtype:
        return None
    return r.call("linear", (x, w, bias), like=node)


def _linear_view(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Unflatten the rows of a linear before it: readers see its result itself, and its input often has that shape already."""
    linear, x, rows = env["linear"], env["x"], list(node.args[1])[:-1]  # type: ignore[arg-type]
    if len(linear.users) > 1 or value_of(x).dim() != 2 or not _contiguous(x):
        return None
    if not rows or not _same(_shape(node)[-1:], _shape(linear)[-1:]):
        return None
    if is_call(x, "view") and _contiguous(x.args[0]):  # type: ignore[arg-type]
        x = x.args[0]
    wanted = (*_shape(node)[:-1], *_shape(linear.args[1])[-1:])
    if not _same(_shape(x), wanted):
        if not isinstance(wanted[-1], int):  # a call needs a node that computes it, and there may be none
            return None
        x = _view_of(r, x, [*rows, wanted[-1]], wanted, node)
    return r.call("linear", (x, *linear.args[1:]), like=node)


def _view_of(r: Rewriter, x: Node, shape: list[Any], sizes: Sequence[Any], before: Node) -> Node:
    """Return a view of a contiguous tensor: a sibling's, if there is one. `sizes` are those of the view; tracing one between
    symbolic sizes would ask which divide which."""
    for user in x.users:
        if READER.name(user) == "view" and user < before and list(user.args[1]) == shape:  # type: ignore[arg-type]
            return user
    made = r.call("view", (x, shape), like=x)
    made.meta["val"] = contiguous_like(value_of(x), sizes)
    return made


def _contiguous(x: Node) -> bool:
    """Whether the elements lie in order for every size. Asking torch could add a guard."""
    expected: Any = 1
    for n, s in zip(reversed(value_of(x).shape), reversed(value_of(x).stride()), strict=True):
        if not compat.statically_true(n == 1) and not compat.statically_true(s == expected):
            return False
        expected = expected * n
    return True


_T = ("t", "permute", "transpose")
_VIEW = ("view", "reshape", "unsafe_view")


def _is_transpose(node: Node) -> bool:
    """Whether the node is t(w), permute(w, [1, 0]) or transpose(w, 0, 1) of a matrix."""
    rest = tuple(node.args[1:])
    row = ops.find(node.target)
    return row is not None and (
        row.name == "t"
        or (row.name == "permute" and list(rest[0]) in ([1, 0], [-1, -2]))  # type: ignore[arg-type]
        or (row.name == "transpose" and {int(d) % 2 for d in rest} == {0, 1})  # type: ignore[arg-type]
    )


def _linear_addmm(r: Rewriter, node: Node, env: Env) -> Node | None:
    scaled = node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1
    return None if scaled or not _is_transpose(env["wt"]) else _linear(r, node, env)


def _linear_mm(r: Rewriter, node: Node, env: Env) -> Node | None:
    return _linear(r, node, env) if _is_transpose(env["wt"]) else None


def _identity_view(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Drop a view that changes nothing. An output must stay its own tensor object."""
    x = env["x"]
    if node in r.returned or not isinstance(x, Node) or not _same_layout(x, node):
        return None
    return x


def _view_view(r: Rewriter, node: Node, env: Env) -> Node | None:
    x = env["x"]
    return r.call("view", (x, node.args[1]), like=node) if _contiguous(x) else None


def _permute_permute(r: Rewriter, node: Node, env: Env) -> Node | None:
    inner, outer = list(env["inner"]), list(env["outer"])
    n = len(inner)
    return r.call("permute", (env["x"], [inner[d % n] % n for d in outer]), like=node)


def _t_t(r: Rewriter, node: Node, env: Env) -> Node | None:
    return env["x"] if node not in r.returned else None


def _attention(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Rewrite attention whose log-sum-exp is unused to the attention that the user wrote, for which torch selects the same
    kernel."""
    users = [u for u in node.users if u.users or u in r.returned]
    if not users or any(not is_projection(u) or u.args[1] != 0 or u in r.returned for u in users):
        return None
    given = {f.name: f.default_value for f in node.target._schema.arguments}  # type: ignore[union-attr]
    given |= {**dict(zip(given, node.args, strict=False)), **node.kwargs}
    q, k, v, dropout, causal = (given[n] for n in ("query", "key", "value", "dropout_p", "is_causal"))
    mask = given.get("attn_mask", given.get("attn_bias"))
    kwargs = {"scale": given["scale"], "enable_gqa": not _same(_shape(q)[1:2], _shape(k)[1:2])}
    new = r.call("sdpa", (q, k, v, mask, dropout, causal), like=users[0], kwargs=kwargs)
    for u in list(node.users):
        u.replace_all_uses_with(new)
        r.graph.erase_node(u)
    return new


def _needless_copy(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Drop a copy that changes nothing, unless its memory is visible outside or the graph writes in place."""
    if node in r.exposed or r.has_writes:
        return None
    return _identity_view(r, node, env)


def _times_one(r: Rewriter, node: Node, env: Env) -> Node | None:
    one = env["one"]
    if isinstance(one, Node) or isinstance(one, bool) or one != 1 or value_of(node).is_complex():
        return None  # a complex 1 makes NaN of infinities
    return _needless_copy(r, node, env)


def _all_replaced(r: Rewriter, node: Node, env: Env) -> Node | None:
    """A caller may see the result's memory, and may see that of a tensor which was filled just for it instead."""
    x = env["x"]
    if node in r.exposed and (not is_call(x, *_SCATTERS) or len(x.users) > 1 or r.has_writes or not _same_layout(x, node)):
        return None
    return x if node in r.exposed else _needless_copy(r, node, env)


def _scattered_into(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Kernels know what a fill holds: they neither make it nor read it."""
    replaced = any(READER.name(u) in (*_SCATTERS, "copy") and u.args[0] is node for u in node.users)
    if not replaced or node in r.exposed or r.has_writes:
        return None
    val = value_of(node)
    options = {"dtype": val.dtype, "layout": val.layout, "device": val.device, "pin_memory": False}
    return r.call("full", (node.args[1], 0), like=node, kwargs=options) if val.is_contiguous() else None


_SCATTERS = ("select_scatter", "slice_scatter")


def _replaces(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Of the place that a copy is for, only type and shape matter; its strides do too where somebody sees the copy itself."""
    if not copies_into_piece(node) or r.has_writes or not isinstance(env["x"], Node) or lazy(value_of(env["x"])):
        return None
    return copied(r, node)


def _read(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Look for a piece before the writes that leave it alone. The gradient of rows that a loop writes is read between writes of
    zeros to each row, all of which nobody reads then."""
    piece, x = place(node), env["x"]
    if piece is None or node in r.exposed or r.has_writes or not is_call(x, *_SCATTERS):
        return None
    found, written = x, place(x)
    while written is not None and written.dim == piece.dim and (written.end <= piece.start or piece.end <= written.start):
        found = written.before
        written = place(found) if is_call(found, *_SCATTERS) else None
    if written is not None and _of(written) == _of(piece) and _same_layout(value := written.node.args[1], node):  # type: ignore[arg-type]
        return cast("Node", value)
    if found is x or not _same_layout(found, x):
        return None
    return r.call(READER.name(node), (found, *node.args[1:]), like=node, kwargs=dict(node.kwargs))


def _computed_piece(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Compute only the pieces along the first dim that somebody reads: the gradient of a stack is selected for each of what it
    stacks, and a select reads memory, so that all of it would be stored."""
    x = env["x"]
    selected = isinstance(x, Node) and all(is_call(u, "select") and u.args[1] == 0 for u in x.users)
    if not selected or node in r.exposed or r.has_writes or not isinstance(node.args[2], int):
        return None
    found = _piece(r, x, node.args[2])
    return found if found is not None and _same_layout(found, node) else None


def _piece(r: Rewriter, x: Node, index: int) -> Node | None:
    """One index of the first dim of what is stacked or computed for this alone, without that dim; None for a piece of memory."""
    if is_call(x, "stack") and (*x.args[1:], 0)[0] == 0:
        return cast("Sequence[Node]", x.args[0])[index]
    if is_call(x, "unsqueeze") and x.args[1] == 0:
        return cast("Node", x.args[0])
    row = ops.find(x.target) if x.op == "call_function" else None
    if row is None or row.kind is not ops.Kind.POINTWISE or not _contiguous(x):
        return None
    rank, length = value_of(x).dim(), _shape(x)[0]

    def piece(arg: Node) -> Node:
        if value_of(arg).dim() < rank:
            return arg
        found = _piece(r, arg, index) if len(arg.users) == 1 or is_call(arg, "stack", "unsqueeze") else None
        return found or r.call("select", (arg, 0, index if _same(_shape(arg)[:1], (length,)) else 0))

    return r.call(row.name, map_arg(x.args, piece), kwargs=map_arg(x.kwargs, piece))


_SCATTERED = frozenset(
    getattr(torch, name)
    for name in "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128".split()
)
"""The types that eager scatters; it refuses others."""


def _one_of_a_row(r: Rewriter, node: Node, env: Env) -> Node | None:
    """Compare each position with the one that a row sets, as kernels compute what reads it with what it is computed from: the
    gradient of a maximum writes one element of a row of zeros. The gather checks the index, as the scatter does."""
    filled, dim, index, source = node.args[:4]
    shape = _shape(node)
    if r.has_writes or not shape or not is_call(filled, "full") or any(isinstance(x, Node) for x in (dim, filled.args[1])):
        return None
    dim = cast("int", dim) % len(shape)
    one = (*shape[:dim], 1, *shape[dim + 1 :])
    if not all(_same(_shape(x), one) for x in (index, source) if isinstance(x, Node)) or not value_of(node).is_contiguous():
        return None
    if value_of(node).dtype not in _SCATTERED:
        return None
    options = {"device": value_of(node).device}
    number = {**options, "dtype": value_of(node).dtype, "layout": torch.strided, "pin_memory": False}
    place = r.call("arange", (0, shape[dim], 1), kwargs={**options, "dtype": torch.int64})
    places = r.call("view", (place, [*[1] * dim, shape[dim], *[1] * (len(shape) - 1 - dim)]))
    row = r.call("expand", (places, list(shape)))
    before = r.call("full", ([], filled.args[1]), kwargs=number)
    value = source if isinstance(source, Node) else r.call("full", ([], source), kwargs=number)
    if is_call(node, "scatter_add"):
        value = r.call("add", (value, before))
    return r.call("where", (r.call("eq", (places, r.call("gather", (row, dim, index)))), value, before))


def _of(piece: Write) -> tuple[int, int, int, bool]:
    return piece.dim, piece.start, piece.end, piece.kept


def _no_padding(r: Rewriter, node: Node, env: Env) -> Node | None:
    return _needless_copy(r, node, env) if not any(isinstance(n, Node) or n for n in env["pad"]) else None


_OF_GPUS = tuple(f"aten._scaled_dot_product_{kind}_attention.default" for kind in ("cudnn", "efficient", "flash"))
"""AOTAutograd's forms of attention on GPUs: torch's own kernel choice, which the same inputs reproduce."""

RULES: tuple[Rule, ...] = (
    Rule("linear.addmm", p("addmm", "bias", "x", p(_T, "w", capture="wt")), _linear_addmm, "addmm(b, x, w.T) = linear(x, w, b)"),
    Rule("linear.mm", p("mm", "x", p(_T, "w", capture="wt")), _linear_mm, "mm(x, w.T) = linear(x, w)"),
    Rule(
        "linear.view",
        p(_VIEW, p("linear", "x", "w", "bias", capture="linear")),
        _linear_view,
        "view(linear(x, w, b), [*rows, n]) = linear(view(x, [*rows, k]), w, b)",
    ),
    Rule("sdpa.lse_unused", p(("sdpa_with_lse", *_OF_GPUS)), _attention, "sdpa_with_lse(q, k, v)[0] = sdpa(q, k, v)"),
    Rule("view.view", p("view", p("view", "x")), _view_view, "view(view(x, a), b) = view(x, b)"),
    Rule("view.same", p("view", "x"), _identity_view, "view(x, x.shape) = x"),
    Rule("expand.same", p("expand", "x"), _identity_view, "expand(x, x.shape) = x"),
    Rule(
        "permute.permute", p("permute", p("permute", "x", "inner"), "outer"), _permute_permute, "permutations compose"
    ),
    Rule("t.t", p("t", p("t", "x")), _t_t, "x.T.T = x"),
    Rule("alias.same", p("alias", "x"), _identity_view, "alias(x) = x"),
    Rule("slice.same", p("slice", "x"), _identity_view, "slice(x, 0, size) = x"),
    Rule("slice_scatter.all", p("slice_scatter", ANY, "x"), _all_replaced, "slice_scatter(y, x, 0, size) = x"),
    Rule(
        "empty.scattered", p(("new_empty", "new_empty_strided"), "x"), _scattered_into,
        "slice_scatter(new_empty(y), x) = slice_scatter(full(0), x)",
    ),
    Rule("copy.same", p("copy", ANY, "x"), _needless_copy, "copy(y, x) = x where x lies as y does"),
    Rule("piece.read", p(("select", "slice"), "x"), _read, "select(select_scatter(x, y, i), j) = select(x, j)"),
    Rule("piece.computed", p("select", "x"), _computed_piece, "select(f(x, y), 0, i) = f(select(x, 0, i), select(y, 0, i))"),
    Rule(
        "scatter.one", p(("scatter", "scatter_value", "scatter_add")), _one_of_a_row,
        "scatter(full(y), dim, i, x) = where(arange == i, x, y) with one index in a row",
    ),
    Rule("copy.piece", p("copy", ANY, "x"), _replaces, "slice_scatter(y, copy(z, x)) = slice_scatter(y, x)"),
    Rule("mul.one", p("mul", "x", "one"), _times_one, "x * 1 = x"),
    Rule("div.one", p("div", "x", "one"), _times_one, "x / 1 = x"),
    Rule("cast.same", p("cast", "x"), _needless_copy, "cast(x, x.dtype) = x"),
    Rule("pad.none", p("constant_pad_nd", "x", "pad"), _no_padding, "constant_pad_nd(x, [0, 0, ...]) = x"),
    Rule("clone.same", p("clone", "x"), _needless_copy, "clone(x) = x where nothing is written in place"),
    *empty.RULES,
)

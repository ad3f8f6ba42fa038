"""Constant attention masks: drop one that masks nothing, replace one that masks the future by `is_causal`.

Model code that skips such a mask in eager builds it under tracing, where it cannot look at values. Attention kernels are then
twice as slow, or refuse: an expanded mask has stride 0 in its last dimension, which no fused GPU kernel accepts. Here the nodes
that build a mask from sizes alone are run once, and the result is inspected; with symbolic sizes they are read (`index_masks`).

Works on Dynamo's graph, before the attention kernel is selected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright.capture import index_masks
from fusewright.interface import HOST, Backend
from fusewright.ops import is_mutating

log = logging.getLogger("fusewright")

PURE = frozenset(
    """
    arange full ones zeros tensor ones_like zeros_like full_like new_ones new_zeros new_full scalar_tensor
    eq ne le lt ge gt and_ or_ xor not_ invert logical_and logical_or logical_not logical_xor
    bitwise_and bitwise_or bitwise_not add sub mul neg floordiv mod abs minimum maximum clamp
    cumsum diff cat stack where masked_fill tril triu isin all any
    view reshape expand expand_as broadcast_to repeat unsqueeze squeeze transpose permute getitem flatten
    contiguous clone to bool int long float type size
    """.split()
)
"""Functions and methods (by name) whose results depend on their arguments alone."""

IN_PLACE = frozenset(f"i{name}" for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split())
"""In-place operators by their names in the module `operator`; as methods, they have underscores around."""

MOST_ELEMENTS = 1 << 26
"""Larger constants are not computed."""


def simplify(gm: GraphModule, backend: Backend) -> None:
    """Rewrite the attention calls of a Dynamo graph as the backend asks for, before anything captures it."""
    if backend.constant_masks:
        fold(gm)
    if backend.batched_attention and (calls := _calls(gm)):
        from fusewright.capture import attention

        attention.with_four_dimensions(gm, calls)


def _calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and n.target in compat.WHOLE]


def fold(gm: GraphModule) -> int:
    """Simplify the attention calls of a Dynamo graph that have constant masks; return how many."""
    calls = _calls(gm)
    written = memory_written(gm) if calls else lambda node: True
    known: dict[Node, Any] = {}
    by_index = index_masks.Reader(written)
    changed = 0
    for call in calls:
        mask = call.kwargs.get("attn_mask", call.args[3] if len(call.args) > 3 else None)
        if isinstance(mask, Node) and (_square_or_all(call, _value(mask, known, written)) or _of_any_size(call, mask, by_index)):
            changed += 1
    if changed:
        constant = known.keys() | {n for n, value in by_index.read.items() if value is not None}
        for node in reversed(list(gm.graph.nodes)):
            if node in constant and not node.users and node.op != "placeholder":
                gm.graph.erase_node(node)
        gm.recompile()
    return changed


def _of_any_size(call: Node, mask: Node, read: index_masks.Reader) -> bool:
    """Rewrite the call if its mask keeps everything, or exactly the past, whatever its sizes."""
    found, already = read(mask), _argument(call, 5, "is_causal", False)
    if found == index_masks.Mask():
        _set(call, is_causal=already)
        return True
    shapes = [index_masks.shape_of(n) for n in (_argument(call, 0, "query", None), _argument(call, 1, "key", None), mask)]
    if found != index_masks.PAST or already or any(s is None or len(s) < 2 for s in shapes):
        return False
    (rows, columns), kept = (s[-2] for s in shapes[:2]), shapes[2][-2:]  # type: ignore[index]
    if not all(compat.statically_true(a == b) for a, b in ((rows, columns), (kept[0], rows), (kept[1], columns))):
        return False
    _set(call, is_causal=True)
    return True


def _square_or_all(call: Node, mask: Any) -> bool:
    """Rewrite the call if its mask keeps everything, or exactly the past."""
    if not isinstance(mask, torch.Tensor):
        return False
    kept = _kept(mask)
    if kept is None:
        return False
    if bool(kept.all()):
        _set(call, is_causal=_argument(call, 5, "is_causal", False))
        return True
    query, key = (_example(_argument(call, k, name, None)) for k, name in ((0, "query"), (1, "key")))
    if query is None or key is None or kept.dim() < 2 or _argument(call, 5, "is_causal", False):
        return False
    rows, columns = query.shape[-2], key.shape[-2]
    if rows != columns or kept.shape[-2:] != (rows, columns):
        return False
    if not bool((kept == kept.new_ones(rows, columns).tril()).all()):
        return False
    _set(call, is_causal=True)
    return True


def _kept(mask: torch.Tensor) -> torch.Tensor | None:
    """The positions that a mask keeps; None if it also adds weights."""
    if mask.dtype is torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    kept = mask == 0
    return kept if bool((kept | (mask <= torch.finfo(mask.dtype).min)).all()) else None


def _argument(call: Node, position: int, name: str, default: Any) -> Any:
    return call.args[position] if len(call.args) > position else call.kwargs.get(name, default)


def _set(call: Node, is_causal: Any) -> None:
    """Remove the call's mask."""
    args, kwargs = list(call.args), dict(call.kwargs)
    if len(args) > 3:
        args[3] = None
    kwargs.pop("attn_mask", None)
    if len(args) > 5:
        args[5] = is_causal
    else:
        kwargs["is_causal"] = is_causal
    call.args, call.kwargs = tuple(args), kwargs


def _example(node: Any) -> torch.Tensor | None:
    found = node.meta.get("example_value") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) and all(isinstance(s, int) for s in found.shape) else None


def _value(node: Node, known: dict[Node, Any], written: Callable[[Node], bool]) -> Any:
    """The value of a node built from sizes alone; None for any other."""
    order = _constants(node, written)
    if order is None:
        return None
    with compat.real_tensors(), torch.no_grad():
        for n in order:
            if n not in known:
                try:
                    known[n] = _run(n, known)
                except (RuntimeError, TypeError, ValueError, IndexError) as e:
                    log.info("a mask is left as it is: %s does not run: %s", n.format_node(), e)
                    return None
    return known[node]


def _constants(node: Node, written: Callable[[Node], bool]) -> list[Node] | None:
    """`node` and the nodes that it is built from, sources first; None if one of them is not constant."""
    found: dict[Node, None] = {}
    todo = [(node, False)]
    while todo:
        n, ready = todo.pop()
        if n in found:
            continue
        if ready:
            found[n] = None
        elif _pure(n) and not written(n):
            todo += [(n, True), *((i, False) for i in n.all_input_nodes)]
        else:
            log.debug("a mask is left as it is: it depends on %s", n.format_node())
            return None
    return list(found)


def _pure(node: Node) -> bool:
    """Whether the node always computes the same."""
    if node.op not in ("call_function", "call_method") or not _fits(node.meta.get("example_value")):
        return False
    return index_masks.name_of(node) in PURE


def _fits(example: Any) -> bool:
    if isinstance(example, torch.Tensor):
        return all(isinstance(s, int) for s in example.shape) and example.numel() <= MOST_ELEMENTS
    if isinstance(example, tuple | list):
        return all(map(_fits, example))
    return isinstance(example, int | float | bool)


def memory_written(gm: GraphModule) -> Callable[[Node], bool]:
    """Return whether somebody may write to a node's memory, also through a view of it."""
    into = {i for n in gm.graph.nodes if writes(n) for i in n.all_input_nodes}
    written = {storage for i in into for storage in storages(i)}
    return lambda node: node in into or not written.isdisjoint(storages(node))


def storages(node: Node) -> set[int]:
    """The identities of the memory of a node's tensors."""
    example = node.meta.get("example_value")
    every = example if isinstance(example, tuple | list) else (example,)
    return {compat.storage_id(x) for x in every if isinstance(x, torch.Tensor) and x.layout is torch.strided}


def writes(node: Node) -> bool:
    """Whether a node may write to an argument: in-place methods and operators, `out=`, item assignment."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return _is_in_place(name) or _is_called_in_place(node) or _mutates(node.target) or "out" in node.kwargs


def _is_in_place(name: str) -> bool:
    """Whether a function or method of this name writes to its first argument: `add_`, `iadd`, `__iadd__`, `setitem`."""
    if name.endswith("_") and not name.endswith("__"):
        return name not in PURE
    operator = name.removeprefix("__").removesuffix("__")
    return operator in IN_PLACE or operator == "setitem"


def _is_called_in_place(node: Node) -> bool:
    """Whether a function of torch (`F.relu`) is called with `inplace=True`, by name or by position."""
    code = getattr(node.target, "__code__", None)
    named = code.co_varnames[: code.co_argcount] if code is not None else ()
    at = named.index("inplace") if "inplace" in named else len(node.args)
    return bool(node.kwargs.get("inplace", *node.args[at : at + 1]))


def _mutates(target: Any) -> bool:
    """Whether a registered operator says that it writes to an argument."""
    every = [getattr(target, name) for name in target.overloads()] if hasattr(target, "overloads") else [target]
    return any(compat.is_overload(o) and is_mutating(o) for o in every)


def _run(node: Node, known: Mapping[Node, Any]) -> Any:
    args, kwargs = torch.fx.node.map_aggregate((node.args, dict(node.kwargs)), lambda a: _given(a, known))
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _given(a: Any, known: Mapping[Node, Any]) -> Any:
    """Convert an argument for a run on the CPU, whatever device the graph runs on."""
    if isinstance(a, Node):
        return known[a]
    return torch.device(HOST) if isinstance(a, torch.device) else a

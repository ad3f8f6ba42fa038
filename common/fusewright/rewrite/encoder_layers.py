"""`nn.TransformerEncoderLayer` in inference as the calls that it consists of.

Without gradients, torch makes one call of a whole layer (its "fast path"), which tracing leaves whole, so that nothing in it can be
lowered. Works on Dynamo's graph, for tensors of the host: on other devices eager's call has not been compared.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import functional as F

from fusewright import _torch_compat as compat
from fusewright.interface import HOST

LAYER = "_transformer_encoder_layer_fwd"
"""The name of torch's function."""

NAMES = (
    "src", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias", "use_gelu", "norm_first", "eps",
    "norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2", "ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2",
    "mask", "mask_type",
)  # fmt: skip
"""The arguments, in schema order."""

OF_KEYS = 1
"""The type of a mask of [batch, keys]; others are of [queries, keys] or [batch, heads, queries, keys]."""


def take_apart(gm: GraphModule) -> int:
    """Rewrite the layers of a Dynamo graph; return how many."""
    calls = [n for n in gm.graph.nodes if n.target is getattr(torch, LAYER) and _plain(n)]
    for call in calls:
        with gm.graph.inserting_before(call):
            made = _layer(_Writer(gm.graph, call), _given(call))
        call.replace_all_uses_with(made)
        gm.graph.erase_node(call)
    if calls:
        gm.recompile()
    return len(calls)


def _given(call: Node) -> dict[str, Any]:
    return {"mask": None, "mask_type": None, **dict(zip(NAMES, call.args, strict=False)), **call.kwargs}


def _plain(call: Node) -> bool:
    """Whether all operands are dense tensors of the host and one type; a mask may have another."""
    given = _given(call)
    mask, floats = given["mask"], [n for n in call.all_input_nodes if n is not given["mask"]]
    found = [_example(n) for n in call.all_input_nodes]
    if any(x is None or x.device.type != HOST for x in found) or _example(given["src"]).dim() != 3:
        return False
    kind = mask is None or given["mask_type"] in (0, OF_KEYS, 2)
    return kind and len({_example(n).dtype for n in floats}) == 1


def _example(n: Node) -> Any:
    found = n.meta.get("example_value")
    plain = isinstance(found, torch.Tensor) and compat.is_fake(found) and not found.is_nested and found.layout is torch.strided
    return found if plain else None


@dataclass(frozen=True)
class _Writer:
    """Writes calls in front of a node, with the values that Dynamo would have traced for them."""

    graph: Graph
    call: Node

    def __call__(self, target: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> Node:
        made = self.graph.create_node("call_method" if isinstance(target, str) else "call_function", target, args, kwargs)
        made.meta = {k: v for k, v in self.call.meta.items() if k != "example_value"}
        given, named = map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with compat.fake_mode_of(self.call.meta["example_value"]):
            fn = getattr(torch.Tensor, target) if isinstance(target, str) else target
            made.meta["example_value"] = fn(*given, **named)
        return made


def _layer(w: _Writer, a: dict[str, Any]) -> Node:
    """See `transformer_encoder_layer_forward` in ATen/native/transformers/transformer.cpp."""

    def norm(x: Node, k: int) -> Node:
        return w(F.layer_norm, x, (a["embed_dim"],), a[f"norm_weight_{k}"], a[f"norm_bias_{k}"], a["eps"])

    before = a["norm_first"]
    x = w(operator.add, _attention(w, norm(a["src"], 1) if before else a["src"], a), a["src"])
    x = x if before else norm(x, 1)
    inner = w(F.linear, norm(x, 2) if before else x, a["ffn_weight_1"], a["ffn_bias_1"])
    inner = w(F.gelu if a["use_gelu"] else F.relu, inner)
    x = w(operator.add, w(F.linear, inner, a["ffn_weight_2"], a["ffn_bias_2"]), x)
    return x if before else norm(x, 2)


def _attention(w: _Writer, x: Node, a: dict[str, Any]) -> Node:
    projected = w(F.linear, x, a["qkv_weight"], a["qkv_bias"])
    parts = w("chunk", projected, 3, -1)
    heads = [w("transpose", w("unflatten", w(operator.getitem, parts, k), -1, (a["num_heads"], -1)), 1, 2) for k in range(3)]
    mask = None if a["mask"] is None else _added(w, a["mask"], a["mask_type"], _example(a["src"]).dtype)
    made = w(F.scaled_dot_product_attention, *heads, attn_mask=mask)
    return w(F.linear, w("flatten", w("transpose", made, 1, 2), 2), a["proj_weight"], a["proj_bias"])


def _added(w: _Writer, mask: Node, kind: int, dtype: torch.dtype) -> Node:
    """What is added to the scores. Eager drops where a mask is not 0, and makes NaN where it drops all keys; attention makes zeros
    of rows of -inf."""
    dropped = w("to", mask, torch.bool)
    if kind == OF_KEYS:
        dropped = w("unsqueeze", w("unsqueeze", dropped, 1), 1)
    added = w("masked_fill", w(torch.zeros_like, dropped, dtype=dtype), dropped, -math.inf)
    return w("masked_fill", added, w("all", dropped, -1, keepdim=True), math.nan)

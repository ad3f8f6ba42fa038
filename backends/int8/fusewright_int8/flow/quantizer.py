"""A PT2E quantizer that annotates exactly what the backend lowers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e import HistogramObserver, MinMaxObserver, PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, QuantizationSpec, Quantizer

from fusewright.errors import QuantizationError, nearest
from fusewright_int8.flow.recipes import Recipe

aten = torch.ops.aten
OPS: dict[Any, str] = {
    aten.linear.default: "linear", aten.conv2d.default: "conv2d", aten.conv2d.padding: "conv2d",
}  # fmt: skip
"""Products -> the names that recipes use."""
_ADDS = (aten.add.Tensor, aten.add_.Tensor)
_KEY = "quantization_annotation"


def names_of(node: Node) -> Iterator[str]:
    """Yield the names of the modules that contain a node, from the outermost, then the node's own."""
    stack = node.meta.get("nn_module_stack") or {}
    yield from (name for name, _ in stack.values() if name)
    yield node.name


def layer_of(node: Node) -> str:
    """Return the name of the innermost module, by which users know the layer."""
    *_, module, own = ("", *names_of(node))
    return module or own


def kept(node: Node, keep: Sequence[str]) -> str | None:
    """Return the pattern that keeps a node in floats, or None."""
    return next(
        (k for k in keep for n in names_of(node) if fnmatch(n, k) or fnmatch(n.removeprefix("L__self___"), k)), None
    )


def check_kept(model: GraphModule, keep: Sequence[str]) -> None:
    """Raise QuantizationError for a pattern that matches nothing in the model and would silently have no effect."""
    for pattern in keep:
        if not any(kept(node, [pattern]) for node in model.graph.nodes):
            layers = {layer_of(node) for node in model.graph.nodes if node.target in OPS}
            raise QuantizationError(f"keep={pattern!r} names no module of the model; {nearest(pattern, layers)}")


SMALLEST = 2.0**-23
"""The smallest scale, for tensors of zeros. Above it every magnitude has all levels, down to weights and inputs of 2e-5."""


def activation(observer: Any = HistogramObserver) -> QuantizationSpec:
    """Return the spec of activations: uint8 with a zero point, one scale per tensor."""
    return QuantizationSpec(
        dtype=torch.uint8, quant_min=0, quant_max=255, qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=observer.with_args(eps=SMALLEST),
    )  # fmt: skip


def weight() -> QuantizationSpec:
    """Return the spec of weights: int8 without zero points, one scale per output channel."""
    return QuantizationSpec(
        dtype=torch.int8, quant_min=-128, quant_max=127, qscheme=torch.per_channel_symmetric, ch_axis=0,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=SMALLEST),
    )  # fmt: skip


class Int8Quantizer(Quantizer):
    """Annotates products according to a recipe. `keep`: patterns of modules that stay in floats; `stayed`: what did, and why."""

    def __init__(self, recipe: Recipe, keep: Sequence[str] = (), fast: bool = False) -> None:
        super().__init__()
        self.recipe, self.keep = recipe, keep
        self.stayed: dict[str, str] = {}
        self._activation, self._weight = activation(MinMaxObserver if fast else HistogramObserver), weight()

    def annotate(self, model: GraphModule) -> GraphModule:
        for node in model.graph.nodes:
            kind = OPS.get(node.target)
            if kind is not None:
                self._product(node, kind)
        if self.recipe.residuals and self.recipe.inputs == "static":
            for node in model.graph.nodes:
                self._residual(node)
        return model

    def validate(self, model: GraphModule) -> None:
        """Accept any model: what is not annotated stays in floats."""

    def _product(self, node: Node, kind: str) -> None:
        if why := self._why_not(node, kind):
            self.stayed[layer_of(node)] = why
            return
        x, w = node.args[:2]
        wanted: dict[Any, Any] = {w: self._weight}
        if self.recipe.inputs == "static":
            wanted[x] = self._activation
        node.meta[_KEY] = QuantizationAnnotation(input_qspec_map=wanted, _annotated=True)

    def _why_not(self, node: Node, kind: str) -> str | None:
        if kind not in self.recipe.ops:
            return f"the recipe {self.recipe.name!r} quantizes {', '.join(sorted(self.recipe.ops))} only"
        if pattern := kept(node, self.keep):
            return f"kept in floats by {pattern!r}"
        x, w = node.args[:2]
        if not (isinstance(w, Node) and w.op == "get_attr"):
            return "its weight is no parameter"
        value = x.meta.get("val") if isinstance(x, Node) else None
        if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float32, torch.bfloat16):
            return "its input is neither fp32 nor bf16"
        return None

    def _residual(self, node: Node) -> None:
        """Annotate the other operand of an addition to a convolution, if a convolution makes it or a quantized product reads it."""
        if node.target not in _ADDS or _KEY in node.meta:
            return
        tensors = [a for a in node.args[:2] if isinstance(a, Node)]
        if len(tensors) != 2 or tensors[0] is tensors[1]:
            return
        sums = [a for a in tensors if self._is_product(a) and len(a.users) == 1]
        if not sums:
            return
        other = tensors[0] if tensors[1] is sums[-1] else tensors[1]
        if self._is_product(other) or any(_KEY in u.meta and OPS.get(u.target) for u in other.users):
            node.meta[_KEY] = QuantizationAnnotation(input_qspec_map={other: self._activation}, _annotated=True)

    @staticmethod
    def _is_product(node: Node) -> bool:
        if node.target in (aten.batch_norm.default, aten._native_batch_norm_legit_no_training.default):
            node = node.args[0]  # type: ignore[assignment]
        return OPS.get(node.target) == "conv2d" and _KEY in node.meta

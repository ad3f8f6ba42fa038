"""Report the accuracy loss of each layer: compare the quantized model with the float one on the same inputs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e

from fusewright.errors import QuantizationError
from fusewright.interface import LayerAccuracy, QuantizationReport
from fusewright_int8.flow.convert import META, as_call, export
from fusewright_int8.flow.quantizer import OPS, Int8Quantizer, layer_of
from fusewright_int8.flow.recipes import RECIPES


class _Results(Interpreter):
    """Runs a graph and keeps the results of its products, by layer and number of the call in it."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.kept: dict[tuple[str, int], tuple[str, Tensor, int]] = {}
        self._calls: dict[str, int] = defaultdict(int)

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        if n.target in OPS and isinstance(found, Tensor):
            layer = layer_of(n)
            self.kept[layer, self._calls[layer]] = (OPS[n.target], found, found.numel() * _per_output(self, n))
            self._calls[layer] += 1
        return found


def _per_output(run: Interpreter, node: Node) -> int:
    """Return the number of multiplications per output element of a product."""
    weight = run.env.get(node.args[1])  # type: ignore[arg-type]
    return 1 if weight is None else weight[0].numel()


def report(model: torch.nn.Module, quantized: torch.nn.Module, inputs: Sequence[Any]) -> QuantizationReport:
    """See `fusewright.interface.Quantization.report`."""
    about = getattr(quantized, "meta", {}).get(META)
    if about is None or not isinstance(quantized, GraphModule):
        raise QuantizationError("the second model was not made by fusewright.quantize")
    if not inputs:
        raise QuantizationError("no inputs to compare the models on")
    calls = [as_call(i) for i in inputs]
    # Nothing is annotated, but batch norms are folded as in the quantized model.
    reference = prepare_pt2e(export(model, calls[0], dynamic_batch=True), Int8Quantizer(RECIPES["static"], ["*"]))
    signal: dict[Any, float] = defaultdict(float)
    noise: dict[Any, float] = defaultdict(float)
    seen: dict[Any, tuple[str, tuple[int, ...], int]] = {}
    whole = [0.0, 0.0]
    with torch.no_grad():
        for args, kwargs in calls:
            flat = pytree.tree_leaves((args, kwargs))
            ours, theirs = _Results(quantized), _Results(reference)
            results = [r.run(*flat, enable_io_processing=False) for r in (theirs, ours)]
            _add(whole, *results)
            for key, (op, exact, work) in theirs.kept.items():
                if key in ours.kept:
                    s, n = _powers(exact, ours.kept[key][1])
                    signal[key] += s
                    noise[key] += n
                    seen[key] = op, tuple(exact.shape), work
    layers = [LayerAccuracy(k[0], *seen[k][:2], decibels(signal[k], noise[k]), seen[k][2]) for k in seen]
    return QuantizationReport(about["recipe"], tuple(layers), about["stayed"], decibels(*whole))


def _add(total: list[float], exact: Any, ours: Any) -> None:
    for a, b in zip(pytree.tree_leaves(exact), pytree.tree_leaves(ours), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point():
            s, n = _powers(a, b)
            total[0] += s
            total[1] += n


def _powers(exact: Tensor, ours: Tensor) -> tuple[float, float]:
    """Return the power of the signal and of the noise."""
    wide = exact.double()
    return float(wide.pow(2).sum()), float((wide - ours.double()).pow(2).sum())


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise); infinite without noise."""
    return math.inf if noise == 0 else -math.inf if signal == 0 else 10 * math.log10(signal / noise)

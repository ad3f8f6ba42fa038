"""Export a model, calibrate it, and convert it to one with quantize and dequantize ops."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e import ObserverBase
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from fusewright.errors import QuantizationError
from fusewright_int8.flow.quantizer import OPS, Int8Quantizer, check_kept, layer_of
from fusewright_int8.flow.recipes import RECIPES, Recipe
from fusewright_int8.flow.simplify import after_converting, before_observing

log = logging.getLogger("fusewright")

META = "fusewright_quantization"
"""Key in a quantized model's `GraphModule.meta`: the recipe, and which layers stayed in floats."""
q = torch.ops.quantized_decomposed


def quantize(
    model: torch.nn.Module, inputs: Sequence[Any], recipe: str, *, keep: Sequence[str] = (), dynamic_batch: bool = True
) -> GraphModule:
    """See `fusewright.interface.Quantization.quantize`. Raises QuantizationError."""
    chosen = RECIPES[recipe]
    if not inputs:
        what = "calibrates on them" if chosen.inputs == "static" else "traces the model with one"
        raise QuantizationError(f"no calibration inputs; the recipe {recipe!r} {what}: give a list of typical inputs")
    if is_quantized(model):
        raise QuantizationError("the model is quantized already; give the model that it was made of")
    calls = [as_call(i) for i in inputs]
    for number, call in enumerate(calls):
        check_finite(call, f"calibration input {number}")
    exported = export(model, calls[0], dynamic_batch)
    check_kept(exported, keep)
    quantizer = Int8Quantizer(chosen, keep)
    prepared = prepare_pt2e(exported, quantizer)
    if not any("quantization_annotation" in n.meta for n in prepared.graph.nodes):
        raise QuantizationError(_nothing(quantizer.stayed, chosen))
    calibrate(prepared, calls if chosen.inputs == "static" else calls[:1])
    return finished(prepared, chosen, quantizer.stayed)


def finished(prepared: GraphModule, recipe: Recipe, stayed: Mapping[str, str]) -> GraphModule:
    """Convert a calibrated model."""
    check_observed(prepared)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torchao warns about its own internals
        converted: GraphModule = convert_pt2e(prepared)
    if recipe.inputs == "row":
        quantize_rows(converted)
    else:
        after_converting(converted)
    for p in converted.parameters():
        p.requires_grad_(False)
    converted.meta[META] = {"recipe": recipe.name, "stayed": dict(stayed)}
    return converted


def is_quantized(model: torch.nn.Module) -> bool:
    """Return whether a model is a graph with quantize or dequantize ops."""
    return isinstance(model, GraphModule) and any(getattr(n.target, "namespace", "") == q.name for n in model.graph.nodes)


def _nothing(stayed: Mapping[str, str], recipe: Recipe) -> str:
    reasons = "; ".join(f"{name}: {why}" for name, why in list(stayed.items())[:3])
    return f"nothing to quantize: the recipe {recipe.name!r} takes {', '.join(sorted(recipe.ops))}. {reasons}".rstrip()


def as_call(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a calibration input as arguments and keyword arguments."""
    if isinstance(given, Mapping):
        return (), dict(given)
    return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}


def check_finite(values: Any, where: str, remedy: str = "calibrate on inputs that the model is meant for") -> None:
    """Raise QuantizationError if a tensor holds NaN or Inf, which would make its scale meaningless."""
    for t in pytree.tree_leaves(values):
        if isinstance(t, Tensor) and t.is_floating_point() and not bool(torch.isfinite(t).all()):
            raise QuantizationError(f"{where} holds NaN or Inf; {remedy}")


def export(model: torch.nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], dynamic_batch: bool) -> GraphModule:
    """Export the model as a graph of ATen ops, with a dynamic batch size if it allows one."""
    if isinstance(model, GraphModule) and any(n.target in OPS for n in model.graph.nodes):
        return model  # already exported
    args, kwargs = call
    failures: list[str] = []
    for shapes in ([_batches(args, kwargs)] if dynamic_batch else []) + [None]:
        try:
            program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
            return before_observing(with_linears(program.module(check_guards=False)))
        except Exception as e:  # the model's code may raise anything; the user is told
            failures.append(f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}")
    raise QuantizationError(
        f"torch.export cannot trace the model ({failures[-1]}). Quantize parts of it (model.encoder = fusewright.quantize("
        "model.encoder, ...)), or leave the model as it is with torchao's quantize_"
    )


def with_linears(model: GraphModule) -> GraphModule:
    """Rewrite `addmm(bias, x, w)` of a parameter as a linear of its transpose, which quantizers know (GPT-2's Conv1D)."""
    aten, changed = torch.ops.aten, False
    for node in model.graph.find_nodes(op="call_function", target=aten.addmm.default):
        bias, x, w = node.args
        if node.kwargs or not isinstance(w, Node) or w.op != "get_attr":
            continue
        holder, _, name = str(w.target).rpartition(".")
        turned = f"{name}_transposed"
        module = model.get_submodule(holder)
        module.register_parameter(turned, torch.nn.Parameter(getattr(module, name).detach().t().contiguous(), requires_grad=False))
        with model.graph.inserting_before(node):
            weight = model.graph.get_attr(f"{holder}.{turned}".lstrip("."))
            weight.meta = dict(w.meta, val=w.meta["val"].t())
            made = model.graph.call_function(aten.linear.default, (x, weight, bias))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        model.graph.erase_node(node)
        changed = True
    if changed:
        model.graph.eliminate_dead_code()
        model.recompile()
    return model


def _batches(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    def dims(t: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(t, Tensor) and t.dim() and t.shape[0] > 1 else None

    both = {"args": args, "kwargs": dict(kwargs)}
    shapes = pytree.tree_map(dims, both)
    return shapes["args"] if not kwargs else shapes["kwargs"] if not args else None


class _Calibrator(Interpreter):
    """Runs a prepared model and checks what its observers see."""

    def __init__(self, prepared: GraphModule) -> None:
        super().__init__(prepared)
        self.extra_traceback = False  # it appends the place in torch's graph to the message, which says nothing to users

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(self.fetch_attr(target), ObserverBase):
            if getattr(self._node.args[0], "op", "") == "get_attr":
                check_finite(args, f"the weight of {self._reader()}", "quantize a model with finite weights")
            check_finite(args, f"what reaches {self._reader()} during calibration")
        return super().call_module(target, args, kwargs)

    def run_node(self, n: Node) -> Any:
        self._node = n
        return super().run_node(n)

    def _reader(self) -> str:
        return next((layer_of(u) for u in self._node.users if u.target in OPS), self._node.name)


def calibrate(prepared: GraphModule, calls: Iterable[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
    """Run the model on inputs for its observers. Raise QuantizationError if it produces NaN or Inf."""
    with torch.no_grad():
        for args, kwargs in calls:
            flat = [v for v in pytree.tree_leaves((args, kwargs))]
            try:
                _Calibrator(prepared).run(*flat, enable_io_processing=False)
            except QuantizationError:
                raise
            except (TypeError, RuntimeError, ValueError) as e:
                raise QuantizationError(
                    f"the model does not take a calibration input: {type(e).__name__}: {e}; every input needs the structure of the "
                    "first, and other sizes in its batch only"
                ) from e


def check_observed(prepared: GraphModule) -> None:
    """Raise QuantizationError if an observer of activations has seen nothing."""
    for node in prepared.graph.nodes:
        if node.op != "call_module":
            continue
        observer = prepared.get_submodule(node.target)
        low = getattr(observer, "min_val", None)
        if (
            isinstance(observer, ObserverBase)
            and isinstance(low, Tensor)
            and (low.numel() == 0 or bool(torch.isinf(low).any()))
        ):
            reader = next((layer_of(u) for u in node.users if u.target in OPS), node.name)
            raise QuantizationError(
                f"the model was not calibrated: nothing has reached {reader}. Run the prepared model on typical inputs first"
            )


def quantize_rows(model: GraphModule) -> None:
    """Quantize the inputs of linears with int8 weights dynamically, row by row."""
    made: dict[Node, Node] = {}
    for node in list(model.graph.nodes):
        if node.target is not torch.ops.aten.linear.default or not _is_quantized(node.args[1]):
            continue
        x = node.args[0]
        if x not in made:
            with model.graph.inserting_before(node):
                made[x] = _rows(model.graph, x)
        node.replace_input_with(x, made[x])
    model.graph.lint()
    model.recompile()


def _is_quantized(node: Any) -> bool:
    return isinstance(node, Node) and "dequantize_per_channel" in str(node.target)


def _rows(graph: Any, x: Node) -> Node:
    """Insert q/dq of the rows of `x`; scales are computed in fp32 whatever its type."""
    dtype = x.meta["val"].dtype
    wide = x if dtype is torch.float32 else graph.call_function(torch.ops.aten.to.dtype, (x, torch.float32))
    chosen = graph.call_function(q.choose_qparams_per_token.default, (wide, torch.int8))
    scale, zero = (graph.call_function(operator.getitem, (chosen, k)) for k in (0, 1))
    levels = graph.call_function(q.quantize_per_token.default, (wide, scale, zero, -127, 127, torch.int8))
    return graph.call_function(q.dequantize_per_token.default, (levels, scale, zero, -127, 127, torch.int8, dtype))

"""Save a model to a file: export each example, compile it, run it once (which checks the plan) and write it as data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fusewright import _torch_compat as compat
from fusewright import pipeline, registry, report
from fusewright.aot import calls, file, identity
from fusewright.capture import direct, masks
from fusewright.config import Options
from fusewright.dynamo import best_backend, gc_paused
from fusewright.errors import ArtifactError, printable
from fusewright.graph.effects import has_collectives
from fusewright.interface import HOST, Backend
from fusewright.plan import serial, vocabulary
from fusewright.report import Kept

log = logging.getLogger("fusewright")

FORMAT = 2


def save(
    model: Any, path: str | Path, examples: Sequence[Any], backend: str | None, options: dict[str, Any] | None
) -> str:
    """See `fusewright.save`."""
    module, compiled_by, compiled_with = compat.compiled_module(model)
    if not isinstance(module, torch.nn.Module):
        raise ArtifactError(
            f"save takes a torch.nn.Module, or what torch.compile makes of one, not {type(model).__name__}"
        )
    if not examples:
        raise ArtifactError("save needs the arguments of a call: save(model, path, inputs)")
    if _trains(module):
        raise ArtifactError("the model is in training mode; call model.eval() first")
    if odd := next((f"{k} is a {type(x).__qualname__}" for k, x in _state(module).items() if type(x) not in calls.ORDINARY), ""):
        raise ArtifactError(f"the weight {odd}; only ordinary tensors can be saved, as in what fusewright.quantize returns")
    if compat.autocast_enabled():
        raise ArtifactError("autocast is on; cast the model instead: model.to(torch.bfloat16)")
    found = [calls.as_example(e) for e in examples]
    name = backend or compiled_by or "fusewright"
    if name == "fusewright":
        name = best_backend([x for args, kwargs in found for x in calls.flatten(args, kwargs)[0]])
    given = dict(options if options is not None else compiled_with or {})
    made = registry.create(name, Options.parse(given, registry.info(name).cls))
    made.prepare()
    blobs: list[bytes] = []
    model = identity.of_model(module).parts  # as built: what a call computes once and keeps is none of the model's
    with identity.code_that_runs() as files:
        programs = [_program(module, made, Options.parse(given, type(made)), e, blobs) for e in found]
    model["files"] |= identity.files_of(files)
    head = {
        "format": FORMAT, "backend": name, "options": given, "machine": identity.of_machine(made),
        "threads": made.policy().count_workers(), "model": model, "programs": programs,
    }  # fmt: skip
    return file.write(Path(path), head, blobs)


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, each under all of its names."""
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers(remove_duplicate=False))}


def _trains(module: torch.nn.Module) -> bool:
    """Whether a module is in training mode; what was exported, and refuses `eval`, has none."""
    exported = (m for m in module.modules() if isinstance(m, GraphModule) and "eval" in vars(m))
    modeless = {id(m) for e in exported for m in e.modules()}
    return any(m.training and id(m) not in modeless for m in module.modules())


def _program(
    module: torch.nn.Module, backend: Backend, options: Options, example: calls.Example, blobs: list[bytes]
) -> dict[str, Any]:
    args, kwargs = example
    leaves, _ = calls.flatten(args, kwargs)
    kwargs = {k: kwargs[k] for k in sorted(kwargs)}
    with torch.no_grad():
        try:
            exported = torch.export.export(module, args, kwargs, strict=False)
        except Exception as e:  # torch.export raises many kinds
            raise ArtifactError(f"torch.export cannot export the model: {printable(e)[:400]}") from e
        gm, names, flat = _inputs(exported, module, leaves)
        kept = _compiled(backend, options, gm, flat)
    plan = kept.plan
    try:
        data = serial.to_data(plan)
    except serial.NotSerializable as e:
        raise ArtifactError(f"the plan cannot be written: {e}") from e
    for problem in vocabulary.find_problems(plan, vocabulary.Words(frozenset(), backend.namespaces)):
        raise ArtifactError(f"the plan calls what no file may: {problem}")
    code = backend.store(list(plan.kernels)) if plan.kernels else b""
    if code is None:
        raise ArtifactError(f"backend {backend.name!r} cannot store its kernels")
    blobs.append(code)
    return {
        "leaves": [calls.Leaf.of(x).as_data() for x in leaves],
        "takes": compat.pytree.treespec_dumps(exported.call_spec.in_spec),
        "gives": compat.pytree.treespec_dumps(exported.call_spec.out_spec),
        "inputs": [_source(n, x, leaves, blobs) for n, x in zip(names, flat, strict=True)],
        "plan": data,
        "code": blobs.index(code),
    }


def _inputs(
    exported: Any, module: torch.nn.Module, leaves: Sequence[Any]
) -> tuple[GraphModule, list[tuple[str, Any]], list[Any]]:
    """The exported graph without non-tensor inputs, the source of each input, and the input values."""
    signature, gm = exported.graph_signature, exported.graph_module
    for spec in signature.output_specs:
        if spec.kind.name != "USER_OUTPUT":
            what = f"{spec.target or 'an input'} ({spec.kind.name.lower()})"
            raise ArtifactError(f"the model writes {what}; only models that change nothing can be saved")
        if type(spec.arg).__name__ not in ("TensorArgument", "ConstantArgument"):
            raise ArtifactError("the model returns what is neither a tensor nor a constant")
    if has_collectives(gm.graph):
        raise ArtifactError("the model talks to other processes")
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        gm.graph.erase_node(node)  # of each cast: what the first run checks of every value, and each call of its inputs
    state = _state(module)
    names, values, user = [], [], iter(range(len(leaves)))
    for spec, node in zip(signature.input_specs, gm.graph.find_nodes(op="placeholder"), strict=True):
        match spec.kind.name:
            case "PARAMETER" | "BUFFER":
                names.append(("weight", spec.target))
                values.append(state[spec.target])
            case "CONSTANT_TENSOR":
                names.append(("constant", spec.target))
                values.append(exported.constants[spec.target])
            case "USER_INPUT":
                at = next(user)
                if not isinstance(leaves[at], torch.Tensor):
                    gm.graph.erase_node(node)
                    continue
                names.append(("leaf", at))
                values.append(leaves[at])
            case kind:
                raise ArtifactError(f"the model takes {spec.target}, a {kind.lower()}")
        node.meta["example_value"] = node.meta["val"]
    gm.recompile()
    return gm, names, values


def _source(name: tuple[str, Any], value: torch.Tensor, leaves: Sequence[Any], blobs: list[bytes]) -> list[Any]:
    """The source of a program's input, as data; constants include their bytes."""
    kind, key = name
    if kind != "constant":
        return [kind, key, calls.Leaf.of(value).as_data()]
    dense = value.detach().to(HOST).contiguous()
    blobs.append(dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    return [
        kind,
        len(blobs) - 1,
        [list(dense.shape), list(dense.stride()), calls.Leaf.of(dense).as_data()[2], value.device.type, None],
    ]


def _compiled(backend: Backend, options: Options, gm: GraphModule, flat: list[Any]) -> Kept:
    """The plan of an exported graph, after a run that confirmed all its metadata."""
    masks.simplify(gm, backend)
    try:
        with gc_paused():
            aten, _ = direct.capture(gm, flat)
    except direct.UnsupportedCapture as doubt:
        raise ArtifactError(f"the model cannot be saved: {str(doubt).splitlines()[0]}") from doubt
    weights = {id(x) for x in flat if isinstance(x, torch.nn.Parameter)} | _buffers(gm, flat)
    const = frozenset(n for n, x in zip(aten.graph.find_nodes(op="placeholder"), flat, strict=True) if id(x) in weights)
    with report.recording(keep=True) as reports:
        run = pipeline.compile_graph(backend, options, aten, "infer", const, "export")
        run(list(flat))
    kept = [r.kept for r in reports if not r.superseded][-1]
    if kept is None:
        raise ArtifactError("the model has nothing to compute")
    return kept


def _buffers(gm: GraphModule, flat: Sequence[Any]) -> set[int]:
    """Python ids of the inputs that are not arguments of a call: parameters, buffers and constants."""
    nodes = gm.graph.find_nodes(op="placeholder")
    return {id(x) for n, x in zip(nodes, flat, strict=True) if n.name.startswith(("p_", "b_", "c_"))}

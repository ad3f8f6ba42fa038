"""Every private torch name that Fusewright uses, for torch 2.10 to 2.15. Imported on first use: not with `import fusewright`."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import logging
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree  # noqa: F401  a private name that others import from here
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

LITERAL = "_tensor_constant"  # how AOTAutograd's names of literals begin
DYNAMO = "torch._dynamo"  # imported by a process's first compilation: a second of a core. Before forking many, import it once

_Compiler = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


def aot_compile(
    gm: GraphModule, inputs: Sequence[Any], *, forward: _Compiler, backward: _Compiler, inference: _Compiler,
    joint: Callable[[Graph], None], fused: frozenset[Any],
) -> Callable[..., Any]:
    """Pass a Dynamo graph to AOTAutograd with the min-cut partitioner, which knows `fused` as pointwise, too. `joint` rewrites the
    joint graph before, and merges equal calls: torch's own pass imports Inductor's lowerings (0.7 s) to count writes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config, partitioners

    def cut(gm: GraphModule, *args: Any, **kwargs: Any) -> Any:
        joint(gm.graph)
        listed, types = partitioners.get_default_op_list, partitioners.get_default_op_list()
        types = replace(types, fusible_ops=types.fusible_ops | fused, recomputable_ops=types.recomputable_ops | fused)
        partitioners.get_default_op_list = lambda: types
        try:
            with config.patch(cse=False):
                return partitioners.min_cut_rematerialization_partition(gm, *args, **kwargs)
        finally:
            partitioners.get_default_op_list = listed

    def first(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        (_traced("bw_donated_idxs") or []).clear()  # no plan writes what backward reads: `retain_graph` may keep it
        return forward(gm, inputs)

    compilers = {"fw_compiler": first, "bw_compiler": backward, "inference_compiler": inference}
    caches = {k: False for k in ("bundled_autograd_cache", "force_autograd_cache") if hasattr(config, k)}  # of Inductor's code
    with _resizing_whole(), config.patch(caches):
        return aot_autograd(**compilers, partition_fn=cut, keep_inference_input_mutations=True)(gm, inputs)


@contextlib.contextmanager
def _resizing_whole() -> Iterator[None]:
    """Make autograd record resizing as one operator and its gradient as another, not torch's Python forms, whose gradient is one
    accumulating scatter per tap. Symbolic sizes keep those: the shape functions of the gradients do not support them."""
    from torch._decomp.decompositions import upsample_compute_output_size as sizes

    def whole(packet: Any, decomposed: Any, x: Any, size: Any, *rest: Any) -> Any:
        *flags, factors = rest
        out = sizes(x.size(), size, factors)
        if any(isinstance(n, torch.SymInt) for n in (*x.size(), *out)):
            return decomposed(x, size, *rest)
        with torch._C._DisablePythonDispatcher():
            return packet.default(x, out, *flags, *(factors or (None, None)))

    packets = [getattr(torch.ops.aten, f"upsample_{kind}2d") for kind in ("nearest", "bilinear", "bicubic")]
    before = [dict(p.vec.py_kernels) for p in packets]
    try:
        for p, kernels in zip(packets, before, strict=True):
            p.vec.py_kernels.update({key: functools.partial(whole, p, kernel) for key, kernel in kernels.items()})
            p.vec._dispatch_cache.clear()
        yield
    finally:
        for p, kernels in zip(packets, before, strict=True):
            p.vec.py_kernels.update(kernels)
            p.vec._dispatch_cache.clear()


def static_input_indices() -> frozenset[int]:
    """Positions of parameters and buffers among the inputs of the graph that AOTAutograd is compiling; empty if unknown."""
    return frozenset(_traced("static_input_indices") or ())


def _traced(name: str) -> Any:
    """What AOTAutograd knows of the graph that it is compiling; None outside of a compilation."""
    from torch._guards import TracingContext

    return getattr(getattr(TracingContext.try_get(), "fw_metadata", None), name, None)


def keep_sources(made: GraphModule, gm: GraphModule) -> None:
    """Copy to a rewritten graph Dynamo's attributes of `gm` that AOTAutograd reads: sources, which tell parameters and buffers."""
    for name in ("_param_name_to_source", "_source_to_user_stacks"):
        if hasattr(gm, name):
            setattr(made, name, getattr(gm, name))
    for old, new in zip(*(g.graph.find_nodes(op="placeholder") for g in (gm, made)), strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source


def shape_env_of(gm: GraphModule) -> Any | None:
    """The ShapeEnv of a traced graph, or None if all sizes are static."""
    for node in gm.graph.nodes:
        val = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(val, torch.SymInt):
            return val.node.shape_env
        if isinstance(val, torch.Tensor) and is_fake(val) and (env := fake_mode_of(val).shape_env) is not None:
            return env
    return None


def assumed_sizes(gm: GraphModule) -> str:
    """What tracing knows of symbolic sizes, as text: ranges and guards. Code may rely on all of it; "" for static graphs."""
    if (env := shape_env_of(gm)) is None:
        return ""
    ranges = sorted(f"{symbol} in {r.lower}..{r.upper}" for symbol, r in env.var_to_range.items())
    later = (a for found in env.deferred_runtime_asserts.values() for a in found)
    return "\n".join([*ranges, *(text for kind in (env.guards, later) for text in sorted(_spelled(g.expr) for g in kind))])


_spelled = functools.lru_cache(1 << 14)(str)  # every graph of a model names the same guards, and sympy's printer is slow


def is_fake(t: object) -> bool:
    """Whether `t` is a FakeTensor: metadata without storage."""
    return isinstance(t, FakeTensor)


def fake_mode_of(t: Any) -> Any:
    """The FakeTensorMode of a FakeTensor; running ops under it propagates metadata."""
    return t.fake_mode


@contextlib.contextmanager
def unguarded(t: Any) -> Iterator[None]:
    """The mode of a FakeTensor, where what torch asks of sizes adds no guard."""
    mode = fake_mode_of(t)
    with mode, mode.shape_env.suppress_guards() if mode.shape_env is not None else contextlib.nullcontext():
        yield


_BOUNDS: WeakKeyDictionary[Any, dict[Any, tuple[Any, ...]]] = WeakKeyDictionary()
"""By ShapeEnv and expression: the bounds, and the symbol ranges that they were derived from."""


def expression_of(size: torch.SymInt) -> Any:
    """The sympy expression of a symbolic size."""
    return size.node.expr


def symbol_of(size: torch.SymInt) -> tuple[Any, int, int, int | None]:
    """(sympy expression, hint, lower bound, upper bound or None) of a symbolic size."""
    node = size.node
    size_hint, env = node.hint, node.shape_env
    if isinstance(size_hint, torch.SymInt) or (env is None and type(size_hint) is not int):
        size_hint = None  # a nested tensor's ragged dimension stands only for itself; its hint is not a number
    lo, hi = (0, None) if env is None else _bounds(env, node.expr)
    return node.expr, int(size_hint) if size_hint is not None else max(lo, 2), lo, hi


def _bounds(env: Any, expr: Any) -> tuple[int, int | None]:
    """Cached bounds of an expression, which a graph mentions many times. Torch walks all of it, however long, each time."""
    known, ranges = _BOUNDS.setdefault(env, {}), env.var_to_range
    if (found := known.get(expr)) is not None and all(ranges.get(s) is r for s, r in found[2]):
        return found[:2]
    bounds = env.bound_sympy(expr)  # None for a ragged dimension in torch 2.11
    lo = int(bounds.lower) if bounds is not None and bounds.lower.is_Integer else 0
    # Not is_integer, which is true of torch's integer infinity.
    hi = int(bounds.upper) if bounds is not None and bounds.upper.is_Integer else None
    known[expr] = (lo, hi, [(s, ranges.get(s)) for s in expr.free_symbols])
    return lo, hi


def traced_size(size: Any) -> int | None:
    """The number that a size was during tracing, without adding a guard; None if it depends on data."""
    found = size.node.hint if isinstance(size, torch.SymInt) else size
    return found if isinstance(found, int) else None


def settled_size(size: Any) -> Any:
    """A size, as a number if guards have fixed its symbol."""
    number = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else None
    return size if number is None else number


def statically_true(condition: Any) -> bool:
    """Whether a (symbolic) condition holds for every size, without adding a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return condition if isinstance(condition, bool) else bool(statically_known_true(condition))


def is_zero_tensor(t: torch.Tensor) -> bool:
    """Whether a tensor is zeros without memory, as autograd's formulas create."""
    return t._is_zerotensor()


def lazy_view(fake: Any, kind: str) -> torch.Tensor:
    """A lazily negated ("neg") or conjugated ("conj") view of a FakeTensor."""
    with fake_mode_of(fake):
        return {"neg": torch.ops.aten._neg_view.default, "conj": torch.ops.aten._conj.default}[kind](fake)


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a placeholder of AOTAutograd's backward graph is an incoming gradient, not a saved value."""
    return node.name.startswith("tangents")


def is_wrapper(t: object) -> bool:
    """Whether a tensor's subclass wraps other tensors, which AOTAutograd unwraps."""
    return is_traceable_wrapper_subclass(t)


def forget_shardings() -> None:
    """Clear DTensor's cache of shardings before AOTAutograd traces DTensors. The cache answers with an equal mesh of an earlier
    model, which is none of the graph's inputs; torch 2.13 then takes the mesh of a tangent for one of the forward graph's."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()


def bound_op(op: Any) -> Callable[..., Any]:
    """The C++ entry point of an OpOverload, which saves one Python frame per call."""
    return getattr(op, "_op", op)


def is_overload(target: object) -> bool:
    """Whether an FX target is an ATen-style operator overload."""
    return isinstance(target, torch._ops.OpOverload)


def is_literal(node: Node) -> bool:
    """Whether a node is a tensor literal of the program, which nobody else references."""
    return node.op == "get_attr" and str(node.target).startswith(LITERAL)


def is_higher_order(target: object) -> bool:
    """Whether an FX target is a higher-order operator (cond, while_loop, ...)."""
    return isinstance(target, torch._ops.HigherOrderOperator)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to the structured trace (TORCH_TRACE), where tlparse shows it beside Dynamo's own."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


PROFILING = "_is_profiler_enabled"
"""The argument for `profiler_flag`'s result."""


def profiler_flag() -> Callable[[str], bool]:
    """A function, not in Python, as each call needs it, that tells, given PROFILING, if `torch.profiler` or `emit_nvtx` is on."""
    return vars(torch.autograd.profiler).__getitem__


def profiling() -> bool:
    """Whether a profiler is active."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def intercepted() -> bool:
    """Whether a mode sees every operator that runs now (a counter of flops, a tracer)."""
    return bool(torch._C._len_torch_dispatch_stack())


def saved_elsewhere() -> bool:
    """Whether hooks receive what autograd saves, as those of activation checkpoints do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def modes() -> tuple[str, ...]:
    """What sees or changes the calls made now, by name: modes of functions and of operators; the default device unless the CPU."""
    if not torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack():
        return ()
    on = torch.overrides._get_current_function_mode_stack(), torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    names = [type(m).__name__ for stack in on for m in stack]
    return (*({str(torch.get_default_device())} - {"cpu"}), *(n for n in names if n != "DeviceContext"))


def hooks_of_all() -> tuple[dict[int, Any], dict[int, Any]]:
    """Torch's own dictionaries of hooks that run before and after every module."""
    return torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks


def may_return_alias(op: Any) -> bool:
    """Whether a result of the operator may share memory with an argument: if the schema says so, or does not cover it."""
    return any(r.alias_info is not None for r in op._schema.returns) or is_composite(op)


def is_composite(op: Any) -> bool:
    """Whether an operator only calls others, so that its schema does not describe their effects."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def op_database() -> Any:
    """Torch's OpInfo database: operators with samples, dtypes and errors, used for torch's own tests."""
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


def register_quantized_decomposed() -> None:
    """Define the `quantized_decomposed` ops, as importing torchao does."""
    import torch.ao.quantization.fx._decomposed  # noqa: F401


def decomposition(target: Any) -> Callable[..., Any]:
    """Torch's decomposition of an ATen overload into simpler ones. LookupError if there is none."""
    from torch._decomp import decomposition_table

    if target not in decomposition_table:
        raise LookupError(f"torch has no decomposition of {target}")
    return decomposition_table[target]


_COMPUTING = frozenset(
    "torch torch._C._nn torch._C._fft torch._C._linalg torch._C._special torch.functional torch.nn.functional "
    "torch._tensor _operator operator math builtins itertools".split()
)
"""Modules whose functions only compute. Other functions in Dynamo graphs may enter a mode, a level of torch.func or the like."""

_SETTERS = ("set_", "_set_", "_enter", "_exit", "manual_seed", "seed", "use_deterministic")


def computes(target: Any) -> bool:
    """Whether a function in a Dynamo graph may be run twice: it only computes, or enters autocast, which is detected and undone."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return True
    if enters_autocast(target) or leaves_autocast(target) or target is torch._C._log_api_usage_once:
        return True
    owner = getattr(target, "__objclass__", None)  # e.g. of `torch.Tensor.add`
    module = getattr(owner, "__module__", None) if owner is not None else getattr(target, "__module__", None)
    if owner is not None and issubclass(torch.Tensor, owner):
        return True
    return module in _COMPUTING and not getattr(target, "__name__", "").startswith(_SETTERS)


def enters_autocast(target: Any) -> bool:
    """Whether a function in a Dynamo graph enters autocast; its result is the argument of `leave_autocast`."""
    return target is torch.amp.autocast_mode._enter_autocast


def leaves_autocast(target: Any) -> bool:
    """Whether a function in a Dynamo graph leaves autocast."""
    return target is torch.amp.autocast_mode._exit_autocast


def leave_autocast(mode: Any) -> None:
    """Undo an `enters_autocast` call."""
    torch.amp.autocast_mode._exit_autocast(mode)


_OF_VMAP = "lazy_load_decompositions _vmap_increment_nesting _vmap_decrement_nesting _add_batch_dim _remove_batch_dim".split()


def of_vmap(target: Any) -> bool:
    """Whether a function in a Dynamo graph enters or leaves a level of vmap, or moves a tensor there."""
    return getattr(target, "__name__", "") in _OF_VMAP and "functorch" in str(getattr(target, "__module__", ""))


@contextlib.contextmanager
def leaving_transforms() -> Iterator[None]:
    """A context that in the end leaves the levels of `torch.func` (vmap, grad, jvp) that an error left entered."""
    top = torch._C._functorch.peek_interpreter_stack
    before = level.level() if (level := top()) else 0
    try:
        yield
    finally:
        while (level := top()) and level.level() > before:
            getattr(torch._C._functorch, f"_{level.key().name.lower().replace('tionalize', '')}_decrement_nesting")()


UNBACKED = "unbacked_bindings"
"""Torch's key in `node.meta` for symbols whose values depend on the node's data."""

_FROM_DATA = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def depends_on_data(op: Any, args: Sequence[Any]) -> bool:
    """Whether a result's size, or a result that is a number, depends on the values of tensors."""
    if op is torch.ops.aten.index.Tensor:  # integer indices give a known number of elements, masks do not
        return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return not _FROM_DATA.isdisjoint(op.tags)


def drop_dead_code(graph: Graph, kept: Callable[[torch.fx.Node], bool]) -> None:
    """Erase unread nodes, except those with an effect according to torch or `kept`."""
    graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure() or kept(node))


@contextlib.contextmanager
def sizes_settled(gm: GraphModule) -> Iterator[list[str]]:
    """A context for work on a graph whose guards are fixed: yields a list of assumptions made about its sizes nonetheless. Symbols
    created while metadata is recomputed are hidden from an enclosing torch tracing, which would look for them among its results."""
    env, assumed = shape_env_of(gm), list[str]()
    if env is None:
        yield assumed
        return
    before = len(env.guards)
    with env.ignore_fresh_unbacked_symbols():
        yield assumed
    assumed += [str(g.expr) for g in env.guards[before:]]


class SizesAssumed(ValueError):
    """Work on a graph with fixed guards would hold only for some of its sizes."""


@contextlib.contextmanager
def assuming_nothing(fake: Any) -> Iterator[None]:
    """A context for tracing with FakeTensors whose guards are fixed. Raises `SizesAssumed` where a guard would be added."""
    env = fake_mode_of(fake).shape_env
    if env is None or "_check_frozen" in vars(env):
        yield
        return

    def refuse(expr: Any, value: Any) -> None:
        raise SizesAssumed(f"{expr} is {value}")

    env._check_frozen = refuse  # every torch asks it before it adds a guard; answers by exceptions are not remembered
    try:
        yield
    finally:
        del env._check_frozen


for _source in ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor"):
    # Torch logs guards, even if they are refused on purpose. For good: threads that trace would remove each other's filters.
    logging.getLogger(_source).addFilter(lambda _: not isinstance(sys.exc_info()[1], SizesAssumed))


def dispatch_mode(handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> Any:
    """A context manager under which every ATen call goes through `handler(op, args, kwargs)`, below autograd and autocast."""
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return handler(func, args, kwargs or {})

    return Mode()


def is_module_state(node: torch.fx.Node, example: Any) -> bool:
    """Whether an input of a Dynamo graph is a parameter or buffer of the compiled module."""
    held = node.meta.get("tensor_dict") or {}
    return isinstance(example, torch.nn.Parameter) or held.get("_dynamo_static_input_type") is not None


def autocast_enabled() -> bool:
    """Whether autocast is on for any device type."""
    return bool(torch._C._is_any_autocast_enabled())


disable_autocast: Callable[[], Any] = torch._C._DisableAutocast
"""A context manager that switches autocast off for every device type."""


def forward_mode() -> bool:
    """Whether derivatives are computed forwards: tensors may have tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def storage_id(t: torch.Tensor) -> int:
    """Identity of the memory behind a (fake) tensor, equal for a tensor, its views and what torch.func wraps around it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return int(t.untyped_storage()._cdata)


def fake_mode(shape_env: Any = None) -> Any:
    """A new FakeTensorMode."""
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)


def fake_tensor(mode: Any, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: str) -> Any:
    """A FakeTensor of any device type, even one that this torch build does not support."""
    return FakeTensor(mode, torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta"), torch.device(device))


class Symbols:
    """Symbolic sizes by name: `Symbols().size("2*s0 + 1")`. Symbols are positive, with distinct hints."""

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.env = ShapeEnv()
        self._known: dict[str, Any] = {}
        self._hints: dict[Any, int] = {}

    def size(self, text: str) -> Any:
        """The SymInt of an expression; an int if it has no symbol. ValueError if it cannot be parsed."""
        import ast

        try:
            expr = self._expr(ast.parse(text.strip(), mode="eval").body)
        except SyntaxError as e:
            raise ValueError(f"{text!r} is no size") from e
        if expr.is_number:
            return int(expr)
        return self.env.create_symintnode(expr, hint=int(expr.xreplace(self._hints)))

    def _symbol(self, name: str) -> Any:
        import sympy  # type: ignore[import-untyped]
        from torch.fx.experimental.symbolic_shapes import ValueRangesSLoc
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        if name not in self._known:
            symbol = sympy.Symbol(name, positive=True, integer=True)
            add = getattr(self.env, "add_backed_var_to_val", None) or self.env.add_var_to_val
            self._hints[symbol] = sympy.Integer(7 + 6 * len(self._known))  # torch 2.10 asks a symbol's replacement for is_Add
            add(symbol, int(self._hints[symbol]))
            self.env.var_to_range[symbol] = ValueRanges(0, int_oo)
            self.env.var_to_range_sloc[symbol] = ValueRangesSLoc(None, None)  # type: ignore[arg-type]
            self._known[name] = symbol
        return self._known[name]

    def _expr(self, node: Any) -> Any:
        import ast

        import sympy
        from torch.utils._sympy import functions

        binary: dict[type, Callable[[Any, Any], Any]] = {
            ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
            ast.Mod: functions.PythonMod, ast.FloorDiv: functions.FloorDiv,
        }  # fmt: skip
        match node:
            case ast.Constant(value=int()):
                return sympy.Integer(node.value)
            case ast.Name(id=name):
                return self._symbol(name)
            case ast.UnaryOp(op=ast.USub()):
                return -self._expr(node.operand)
            case ast.BinOp() if type(node.op) in binary:
                return binary[type(node.op)](self._expr(node.left), self._expr(node.right))
            case ast.Call(func=ast.Name(id=name), keywords=[]) if hasattr(functions, name):
                return getattr(functions, name)(*map(self._expr, node.args))
        raise ValueError(f"{ast.unparse(node)!r} is no size")


def compiled_module(model: Any) -> tuple[Any, str | None, dict[str, Any] | None]:
    """The module given to `torch.compile`, with backend and options if the result tells them; other objects as they are."""
    if not hasattr(model, "_orig_mod"):
        return model, None, None
    at = getattr(getattr(model, "dynamo_ctx", None), "callback", None)
    while at is not None:
        if isinstance(name := getattr(at, "compiler_name", None), str):
            options = (getattr(at, "kwargs", None) or {}).get("options")
            return model._orig_mod, name, dict(options) if options else None
        at = getattr(at, "_torchdynamo_orig_backend", None) or getattr(at, "_torchdynamo_orig_callable", None)
    return model._orig_mod, None, None


def counted(kind: str) -> dict[str, int]:
    """Dynamo's counts: `graph_break`, `unimplemented` (also breaks) by reason; `frames` that it saw (`total`), traced (`ok`)."""
    from torch._dynamo.utils import counters

    return {str(what): int(n) for what, n in counters[kind].items()}


def saved_result() -> Any:
    """The class that torch wants results of backends to be of where it saves them (`aot_compile`), else None."""
    from torch._functorch import config

    made = "torch._dynamo.aot_compile_types"
    return importlib.import_module(made).SerializableCallable if config.bundled_autograd_cache else None


def graph_pickler() -> Any:
    """Torch's module that pickles Dynamo's graphs with their fake inputs."""
    return importlib.import_module("torch.fx._graph_pickler")


class DynamoCall(NamedTuple):
    """A call in which Dynamo compiles a graph: an object for the compiled function, hooks at the start of its calls (each returns
    one for the end), the call's identity, the callable that it enters, the code that is traced, and those that are running."""

    function: object
    hooks: list[Callable[[], Callable[[], None]]]
    id: int
    entered: object
    code: CodeType
    running: Sequence[CodeType]


def current_call() -> DynamoCall | None:
    """The innermost call in which Dynamo is compiling; None if there is none, or this torch has no hooks."""
    from torch._dynamo.symbolic_convert import tls

    running, start = _frames_of_call(sys._getframe())
    function = start.f_locals.get("self") if start else None
    hooks = getattr(function, "enter_exit_hooks", None)
    traced = getattr(getattr(tls, "current_tx", None), "f_code", None)
    if start is None or hooks is None or traced is None:
        return None
    return DynamoCall(function, hooks, id(start), start.f_locals.get("fn"), traced, running)


def arguments_of_call() -> list[Any]:
    """In one of `DynamoCall.hooks`: whether the module that is called trains, if it is one, and the arguments of the call."""
    start = _frames_of_call(sys._getframe())[1]
    given = start.f_locals if start else {"fn": None, "args": (), "kwargs": {}}  # copies all locals
    return [getattr(getattr(given["fn"], "__self__", None), "training", None), *given["args"], *given["kwargs"].values()]


def _frames_of_call(f: FrameType | None) -> tuple[list[CodeType], FrameType | None]:
    """What runs in `f`, up to the innermost call of a compiled function, and its frame. A list of frames would hold itself."""
    codes = list[CodeType]()
    while f and (f.f_code.co_name != "compile_wrapper" or f.f_globals.get("__name__") != f"{DYNAMO}.eval_frame"):
        codes.append(f.f_code)
        f = f.f_back
    return codes, f


def skips(code: CodeType) -> list[Callable[[], None]]:
    """Two functions: one lets Python run `code` and what it calls, one lets Dynamo do so again."""
    made, change = torch._dynamo.types, functools.partial(torch._dynamo.eval_frame.set_code_exec_strategy, code)
    return [functools.partial(change, made.FrameExecStrategy(a, a)) for a in (made.FrameAction.SKIP, made.FrameAction.DEFAULT)]


def without_frames(function: object) -> Callable[[], object]:
    """What allows a call of a function with `fullgraph`, which torch else refuses, to run nothing that Dynamo compiled."""
    count = getattr(torch._C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    return functools.partial(count, -1) if count is not None and getattr(function, "fullgraph", False) else lambda: None


def around_compilations(start: Callable[[Any], None], end: Callable[[Any], None]) -> bool:
    """Let Dynamo, if it is imported, call these around its compilations until `torch.compiler.reset`. Return whether it does so."""
    handler = getattr(sys.modules.get(DYNAMO), "callback_handler", None)
    known = handler is not None and start in handler.start_callbacks
    if handler is not None and not known:
        handler.register_start_callback(start)
        handler.register_end_callback(end)
    return known


def read_no_masks() -> None:
    """Let Dynamo, if it is imported, trace `torch.nn.Transformer` without reading its masks, where its graph would break: eager
    only asks whether they are causal, and they are applied in any case."""
    if DYNAMO in sys.modules:
        _read_no_masks()


@functools.cache
def _read_no_masks() -> None:
    if (f := getattr(torch.nn.modules.transformer, "_detect_is_causal_mask", None)) is not None:  # of mask, is_causal, size
        torch.compiler.substitute_in_graph(f, skip_signature_check=True)(lambda m, c=None, n=None: c is True)  # type: ignore[misc]


real_tensors: Callable[[], Any] = unset_fake_temporarily
"""A context manager in which ops really compute, since AOTAutograd compiles inside a FakeTensorMode."""

WHOLE: dict[Any, Any] = {torch._C._nn.scaled_dot_product_attention: torch.ops.aten.scaled_dot_product_attention.default}
"""Functions in Dynamo graphs that are recorded as one operator, though tracing would decompose them."""

CHECKED_IN_PYTHON: frozenset[Any] = frozenset({torch._C._nn.one_hot})
"""Functions in Dynamo graphs whose C++ form skips value checks on FakeTensors; torch has Python forms for them."""


def has_python_form(op: Any) -> bool:
    """Whether this torch has a Python form of a composite operator, which AOTAutograd traces."""
    import torch._decomp  # registers them

    return torch._C.DispatchKey.CompositeImplicitAutograd in op.py_kernels


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """A context with torch's own operators, outside the caller's modes and dispatcher: with a FakeTensor, or by an operator's
    Python form, a view may exist that a real tensor of the same strides does not have."""
    from torch._dispatch.python import no_python_dispatcher

    with _disable_current_modes(), no_python_dispatcher():
        yield


def python_dispatcher() -> Any:
    """A context manager that selects torch's Python forms of operators, as in AOTAutograd's tracing."""
    return importlib.import_module("torch._dispatch.python").enable_python_dispatcher()


def symbolic_mode() -> Any:
    """A FakeTensorMode whose `from_tensor` makes sizes symbolic."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return fake_mode(ShapeEnv())


def guards_hold(shape_env: Any, fakes: Sequence[Any], tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what tracing assumed of the sizes of `fakes` holds for `tensors`."""
    return bool(shape_env.evaluate_guards_for_args(list(fakes), list(tensors), ignore_static=False))


def unowned(t: torch.Tensor) -> torch.Tensor:
    """A tensor that shares the memory of `t` without keeping it alive. On CPUs and CUDA only."""
    storage = t.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), t.device, storage.nbytes())
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(memory, t.storage_offset(), t.shape, t.stride())


storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""The reference count of a storage with this `storage_id`, including Python objects of it."""


def forward_results() -> tuple[int, list[int]]:
    """How many results of the graph that AOTAutograd is compiling are not saved for backward, which come first, and the positions
    of those that are views of its inputs."""
    first, results = _traced("num_mutated_inp_runtime_indices") or 0, _traced("output_info") or ()
    return int(_traced("num_forward") or 0), [first + k for k, o in enumerate(results) if o.output_type.name == "alias_of_input"]


def clear_workspaces() -> None:
    """Free the memory that torch keeps for cuBLAS or hipBLAS, as Inductor's graph trees do around each of their graphs."""
    torch._C._cuda_clearCublasWorkspaces()


def tensor_queries() -> tuple[int, int, int, list[int]]:
    """Torch's functions for a tensor's address and version, by address: `int aoti_torch_get_data_ptr(at::Tensor*, void**)` and
    `int64_t at::TensorBase::_version() const`; the offset in a Python tensor of its `at::Tensor`, a pointer that `_cdata` is too;
    functions like the first for its layout. Zeros where they are missing or differ from what Python says."""
    name = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(sys.platform, "libtorch_cpu.so")
    try:
        lib = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", name))
        address, version = lib.aoti_torch_get_data_ptr, lib._ZNK2at10TensorBase8_versionEv
        layout = [getattr(lib, f"aoti_torch_get_{n}") for n in ("dim", "sizes", "strides", "dtype", "device_index", "storage_size")]
    except (OSError, AttributeError):
        return 0, 0, 0, []
    version.restype, found = ctypes.c_int64, ctypes.c_void_p()
    with without_modes(), torch.inference_mode(False):  # the first call may come while a graph is traced
        probes = [torch.zeros(1, device="cpu").zero_(), torch.nn.Parameter(torch.zeros(1, device="cpu"))]
    for offset in range(object.__basicsize__, torch.Tensor.__basicsize__, 8):
        places = [ctypes.c_void_p(id(t) + offset) for t in probes]
        if all(ctypes.c_uint64.from_address(p.value or 0).value == t._cdata for t, p in zip(probes, places, strict=True)):
            told = [(address(p, ctypes.byref(found)), found.value, version(p)) for p in places]
            first, second, *others = (ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (address, version, *layout))
            return (first, second, offset, others) if told == [(0, t.data_ptr(), t._version) for t in probes] else (0, 0, 0, [])
    return 0, 0, 0, []


current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
"""The index of the current GPU, without a Python frame."""

_current: Callable[[int], int] = lambda k: torch.cuda.current_stream(k).cuda_stream  # noqa: E731
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _current)
"""The handle of a GPU's current stream, by GPU index, without allocating an object."""

_guards = torch._C._dynamo.guards
_empty = {d: lambda n, s, t, d=d: torch.empty_strided(n, s, dtype=t, device=d) for d in ("cuda", "cpu")}
empty_strided_on_device, empty_strided_on_host = (getattr(_guards, f"_empty_strided_{d}", f) for d, f in _empty.items())
"""Allocate sizes, strides and a dtype on the current GPU or the host, without the dispatcher."""

view_of_memory = getattr(_guards, "_reinterpret_tensor", lambda x, n, s, k: x.as_strided(n, s, x.storage_offset() + k))
"""A tensor of given sizes and strides from an offset in another's memory: no view to autograd, and with its own version."""


@contextlib.contextmanager
def inductor_provenance() -> Iterator[list[dict[str, list[str]]]]:
    """The kernels of each graph that Inductor compiles meanwhile, by name, with their stack traces. Empty if torch has none."""
    from torch._inductor import config, output_code
    from torch._inductor.utils import fresh_cache

    kept: list[dict[str, list[str]]] = []
    made = output_code.CompiledFxGraph.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        kept.append(json.loads(getattr(self, "inductor_provenance_stack_traces_str", None) or "{}"))

    settings = {"trace.provenance_tracking_level": 1, "cpp.enable_kernel_profile": True}
    known = config.get_config_copy()
    output_code.CompiledFxGraph.__init__ = init  # type: ignore[method-assign]
    try:
        with fresh_cache(), config.patch({k: v for k, v in settings.items() if k in known}):
            yield kept
    finally:
        output_code.CompiledFxGraph.__init__ = made  # type: ignore[method-assign]


def inductor_freezing() -> contextlib.AbstractContextManager[None]:
    """Make Inductor treat weights as constants in this context: Dynamo, which makes them inputs, ignores options."""
    from torch._inductor import config

    return config.patch(freezing=True)


def aot_inductor() -> Any:
    """The module of `aoti_compile_and_package` and `aoti_load_package`, as documented for AOTInductor."""
    return importlib.import_module("torch._inductor")

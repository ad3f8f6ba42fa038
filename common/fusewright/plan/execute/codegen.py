"""Generate the Python function of a plan: it is executed, and `explain` prints it."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.profiler import record_function

from fusewright import _torch_compat as compat
from fusewright.errors import sized, without_memory
from fusewright.interface import HOST, Dim, KernelCode, Size
from fusewright.ops.states import draw
from fusewright.plan import native
from fusewright.plan.build import Plan, operator_of
from fusewright.plan.execute.firstrun import Check
from fusewright.plan.execute.frame import Frame, Frames, bits, entry, fail
from fusewright.plan.execute.prepare import PreparedCache
from fusewright.plan.execute.queued import queued
from fusewright.plan.execute.views import is_view, is_whole, with_views
from fusewright.plan.ir import Bound, Call, CallPython, Instruction, Launch, Ref, copied, reads
from fusewright.plan.labels import labeler
from fusewright.plan.memory import Placement
from fusewright.plan.seeds import on_host, seeds
from fusewright.plan.verify import PLACE
from fusewright.plan.vocabulary import (
    SIZES,
    TORCH,
    comment,
    function_of,
    identifier,
    is_symbol,
    keyword,
    text_of_size,
)
from fusewright.sizes.expr import SizeExpr, names

_BUILTINS = {"__import__": __import__}
"""C++ code imports modules through its caller. No generated name begins with "_"."""


class Names:
    """The namespace of the generated code: operators under readable names, and objects without a literal form. No Python
    builtins except those added here."""

    def __init__(self) -> None:
        own: dict[str, Any] = {"torch": TORCH, "inf": math.inf, "nan": math.nan, "complex": complex}
        self.space: dict[str, Any] = {"__builtins__": _BUILTINS, **own, **SIZES}
        self._functions: dict[str, str] = {}

    def function(self, target: str) -> str:
        """A name for a torch operator or Python function, bound to its fastest entry point."""
        if target not in self._functions:
            name = identifier(target.replace("::", "_"))
            if name in self.space:  # taken by a name that differs only in punctuation
                name = f"{name}_{len(self.space)}"
            self.space[name] = function_of(target)
            self._functions[target] = name
        return self._functions[target]

    def object(self, prefix: str, value: Any) -> str:
        """A fresh name for an object."""
        name = f"{identifier(prefix)}_{len(self.space)}"
        self.space[name] = value
        return name

    def literal(self, x: Any) -> str:
        """Source text of an argument."""
        match x:
            case Ref():
                return f"v{x.id}"
            case tuple() | list():
                return "[" + ", ".join(self.literal(i) for i in x) + "]"
            case torch.device():
                return f"torch.device({str(x)!r})"
            case torch.dtype() | torch.layout() | torch.memory_format():
                return str(x)
            case bool() | int() | str() | None:
                return repr(x)
            case float():
                return repr(x)
            case complex():
                return f"complex({x.real!r}, {x.imag!r})"  # repr() of a complex with NaN or Inf is not valid Python
        return self.object("const", x)


def _call(i: Call | CallPython, names: Names) -> str:
    left = ", ".join(f"v{o}" for o in i.outs)
    if isinstance(i, CallPython):
        left += "," if len(i.outs) == 1 else ""
        text = f"{names.object(i.name, i.fn)}({', '.join(names.literal(a) for a in i.args)})"
    else:
        left += "," if i.packed and len(i.outs) == 1 else ""
        args = [names.literal(a) for a in i.args] + [f"{keyword(k)}={names.literal(v)}" for k, v in i.kwargs]
        called = names.function(i.target)
        if i.generator is not None:
            args, called = [names.literal(i.generator), called, *args], "draw"
        text = f"{called}({', '.join(args)})"
    return f"{left} = {text}" if left else text


class _Launches:
    """Write the launches of a plan, and collect what a frame must hold for them. `bound`: launch also the calls that can be,
    and make views without torch."""

    def __init__(
        self, plan: Plan, placement: Placement, kernels: Mapping[str, KernelCode], names: Names, core: Any | None = None,
        bound: bool = True,
    ) -> None:  # fmt: skip
        self.plan, self.placement, self.kernels, self.names, self.core = plan, placement, kernels, names, core
        self.bound: Mapping[int, Bound] = placement.bound if bound else {}
        self.direct = bound
        self.home = _home(plan)
        self.blocks: dict[int, list[Any]] = {}
        self._shared: dict[Hashable, tuple[str, str]] = {}
        self._types: dict[Any, str] = {}

    def lines(self, i: Launch, framed: bool) -> list[str]:
        """Allocate the outputs, then call; `framed` if a frame holds the argument blocks."""
        made, code = [self._allocate(o, framed) for o in i.outs], self.kernels[i.kernel]
        if not framed or code.address is None:
            return [*made, self._python(i)]
        tensors = (*i.inputs, *map(Ref, i.outs))
        return made + self._native(code, (*tensors, *i.sizes, *i.scalars), len(tensors))

    def launches(self, i: Instruction) -> bool:
        """Whether an instruction relies on the metadata of what it reads."""
        return isinstance(i, Launch) or not self.bound.keys().isdisjoint(i.outs)

    def of_call(self, i: Call, text: str, framed: bool) -> list[str]:
        """The lines for a call whose text is given."""
        bound = self.bound.get(i.outs[0]) if framed and i.outs else None
        if bound is None:
            return [text]
        out, made = f"v{i.outs[0]}", self._allocate(i.outs[0], framed)
        launch = self._native(bound.code, bound.words, len(bound.words))
        if not bound.types:
            return [made, *launch]
        fits = " and ".join(f"v{ref.id}.dtype is {self._type(dtype)}" for ref, dtype in bound.types)
        return [
            made, f"if {fits}:", *(f"    {line}" for line in launch),
            f"else: {out}.copy_({text.removeprefix(f'{out} = ')})",
        ]  # fmt: skip

    def changed(self, i: Call) -> int | None:
        """The tensor that a kernel has changed already, if the call would copy it to itself."""
        x, new = copied(i) or (None, None)
        while new in self.placement.onto and new != x:
            new = self.placement.onto[new]
        return x if new == x else None

    def _type(self, dtype: Any) -> str:
        """A name for a type, which is read faster than `torch.int8`."""
        if dtype not in self._types:
            self._types[dtype] = self.names.object("type", dtype)
        return self._types[dtype]

    def _allocate(self, out: int, framed: bool) -> str:
        if out in self.placement.onto:
            return f"v{out} = v{self.placement.onto[out]}"
        if out in self.placement.offset:
            return f"v{out} = frame.v{out}"
        spec = self.plan.specs[out]
        sizes = f"{_sizes(spec.shape)}, {_sizes(spec.stride)}, "
        if framed and self.direct and spec.device == self.home:
            return f"v{out} = allocate({sizes}{spec.dtype})"
        device = "" if spec.device == HOST else f", device={spec.device!r}"
        return f"v{out} = empty_strided({sizes}dtype={spec.dtype}{device})"

    def _python(self, i: Launch) -> str:
        tensors = [f"v{v}" for v in (*(r.id for r in i.inputs), *i.outs)]
        sizes, scalars = (", ".join(self._number(x) for x in xs) for xs in (i.sizes, i.scalars))
        call = self.names.object("launch", self.kernels[i.kernel].call)
        return (
            f"{call}(({', '.join(tensors)},), ({sizes}{',' if i.sizes else ''}), ({scalars}{',' if i.scalars else ''}))"
        )

    def _native(self, code: KernelCode, words: Sequence[Any], among: int) -> list[str]:
        """Write the call's variable arguments into the block; the frame has already filled in the rest. A `Ref` among the first
        `among` words is a tensor, later a number."""
        k = len(self.blocks)
        block: list[Any] = []
        fill: dict[int, str] = {}
        tensors: set[int] = set()
        for x in words:
            if isinstance(x, Ref) and self._in_arena(x.id):
                block.append(("arena", x.id))
            elif isinstance(x, int | float) and not isinstance(x, bool):
                block.append(bits(x, isinstance(x, float)))
            else:
                if isinstance(x, Ref) and len(block) < among:
                    tensors.add(len(block))
                fill[len(block)] = self._number(x)
                block.append(None)
        self.blocks[k] = block
        workers = "workers" if self.plan.policy.workers else "1"
        if self.core is not None:
            call, held = self._code(code, tuple(fill))
            return [
                f"e = {call}({', '.join((f'frame.p{k}', workers, *fill.values()))})",
                f"if e: fail({held}, e, frame.b{k})",
            ]
        call, held = self._code(code)
        start = [f"b = frame.b{k}"] if fill else []
        filled = [f"b[{n}] = {x}.data_ptr() or without_memory({x})" if n in tensors else f"b[{n}] = {x}" for n, x in fill.items()]
        return [*start, *filled, f"e = {call}(frame.p{k}, {workers})", f"if e: fail({held}, e, frame.b{k})"]

    def _in_arena(self, value: int) -> bool:
        return value in self.placement.offset

    def _code(self, code: KernelCode, places: tuple[int, ...] | None = None) -> tuple[str, str]:
        """Names of a kernel's callable and of its code. With `places`, the callable first fills these words of the block."""
        key = (id(code), places)
        if key not in self._shared:
            assert code.address is not None
            run = entry(code.address) if self.core is None else self.core.launch(code.address, places)
            self._shared[key] = (self.names.object("kernel", run), self.names.object("code", code))
        return self._shared[key]

    def _number(self, x: Any) -> str:
        return text_of_size(x) if isinstance(x, SizeExpr) else self.names.literal(x)

    def frame(self) -> Callable[[], Frame]:
        """Return a factory of frames; each call uses one."""
        places = {v: (at, self.plan.specs[v]) for v, at in self.placement.offset.items()}
        return lambda: Frame(self.placement.arena_bytes, self.placement.device, places, self.blocks)


def _home(plan: Plan) -> str:
    """The device of most results of launches."""
    devices = Counter(plan.specs[o].device for i in plan.instructions if isinstance(i, Launch) for o in i.outs)
    return devices.most_common(1)[0][0] if devices else HOST


def _allocation(device: str) -> Callable[[], Callable[..., torch.Tensor]]:
    """What gives a call the fastest function that allocates sizes, strides and a type on a device."""
    if device == HOST:
        return lambda: compat.empty_strided_on_host

    def anywhere(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    kind, index = torch.device(device).type, torch.device(device).index
    if kind != "cuda":
        return lambda: anywhere
    return lambda: compat.empty_strided_on_device if index in (None, compat.current_device()) else anywhere


def _sizes(sizes: Sequence[Size]) -> str:
    return "(" + "".join(f"{s}, " if isinstance(s, int) else f"{text_of_size(s.expr)}, " for s in sizes) + ")"


class _Symbols:
    """Define the size symbols used by launches and views, from shapes and values of the inputs, and from results with
    data-dependent sizes."""

    def __init__(self, plan: Plan, instructions: Sequence[Instruction], bound: Mapping[int, Bound]) -> None:
        self._plan = plan
        launches = (i for i in instructions if isinstance(i, Launch))
        self._open = {n for i in launches for n in _mentioned(plan, i.outs, (*i.sizes, *i.scalars))}
        self._open |= {n for out, b in bound.items() for n in _mentioned(plan, (out,), b.words)}
        self._open |= {n for i in instructions if is_view(i) for n in _mentioned(plan, i.outs, ())}

    def of(self, ids: Iterable[int]) -> list[str]:
        """Definitions that become possible once these values exist."""
        known: dict[str, str] = {}
        for i in ids if self._open else ():
            if i in self._plan.scalars:
                known.setdefault(self._plan.scalars[i], f"v{i}")
            spec = self._plan.specs.get(i)
            told = (("shape[", spec.shape, "]"), ("stride(", spec.stride, ")")) if spec is not None else ()
            for what, sizes, end in told:
                for d, s in enumerate(sizes):
                    if isinstance(s, Dim) and s.expr.name is not None:
                        known.setdefault(s.expr.name, f"v{i}.{what}{d}{end}")
        found = [f"    {name} = {source}" for name, source in known.items() if name in self._open and is_symbol(name)]
        self._open -= known.keys()
        return found


def _mentioned(plan: Plan, outs: Sequence[int], numbers: Sequence[Any]) -> Iterator[str]:
    """Names in a launch's numbers and output shapes."""
    made = (s for o in outs for s in (*plan.specs[o].shape, *plan.specs[o].stride) if isinstance(s, Dim))
    for size in (*(s.expr for s in made), *numbers):
        yield from names(size)


def _comment(plan: Plan, i: Instruction) -> str:
    parts = []
    if i.outs and (spec := plan.specs.get(i.outs[0])) is not None:
        parts.append(f"{str(spec.dtype).removeprefix('torch.')}[{', '.join(map(str, spec.shape))}]")
    op_id = getattr(i, "op_id", None)
    if op_id is not None and plan.comments.get(op_id):
        parts.append(plan.comments[op_id])
    return "  # " + comment(" ".join(parts)) if parts else ""


def _last_reads(instructions: Sequence[Instruction], keep: set[int]) -> dict[int, list[int]]:
    """Instruction position -> ids that die after it. Unread results die where they are made."""
    last: dict[int, int] = {}
    for k, i in enumerate(instructions):
        for r in (*i.outs, *reads(i)):
            last[r] = k
    dead: dict[int, list[int]] = {}
    for r, k in last.items():
        if r not in keep:
            dead.setdefault(k, []).append(r)
    return dead


Label = Callable[[Instruction], str]
"""The profiler label of an instruction."""


def _body(
    plan: Plan, instructions: Sequence[Instruction], keep: set[int], names: Names, launches: _Launches,
    checked: Container[int] = (), symbols: _Symbols | None = None, observed: bool = False, label: Label | None = None,
    queues: Sequence[range] = (), framed: bool = True,
) -> list[str]:  # fmt: skip
    """Code lines for instructions. `checked`: values whose metadata the first run compares, after eager's calls. `queues`: runs of
    instructions whose launches are queued."""
    opens, closes = {r.start for r in queues}, {r.stop for r in queues}
    dead = _last_reads(instructions, keep)
    lines: list[str] = []
    asserted: dict[int, str] = {}
    for k, i in enumerate(instructions):
        lines += ["    close_queue()"] * (k in closes) + ["    open_queue()"] * (k in opens)
        if asserted and any(o in plan.specs for o in i.outs):  # the graph's own assertions come first: their messages are eager's
            lines += [asserted.pop(r) for r in set(reads(i)) & asserted.keys()]
        written = _instruction(i, plan, names, launches, framed)
        written[0] += _comment(plan, i)
        lines += [f"    {line}" for line in (_marked(written, names.object("label", label(i))) if label else written)]
        checks = {} if isinstance(i, Launch) else {o: f"    check({{{o}: v{o}}})" for o in i.outs if o in checked}
        if symbols is not None and isinstance(i, Call) and not is_view(i):
            asserted |= {o: "\n".join([line, *_pop(checks, o)]) for o, line in _asserted(plan, i)}
        lines += checks.values()
        if observed:
            lines.append(f"    observe({k}, ({''.join(f'v{o}, ' for o in i.outs)}))")
        if symbols is not None:
            lines += symbols.of(i.outs)
        if k in dead:
            lines += [asserted.pop(r) for r in dead[k] if r in asserted]
            lines.append("    del " + ", ".join(f"v{r}" for r in sorted(dead[k])))
    lines += ["    close_queue()"] * (len(instructions) in closes)
    return [*lines, *asserted.values()]


def _instruction(i: Instruction, plan: Plan, names: Names, launches: _Launches, framed: bool) -> list[str]:
    if isinstance(i, Launch):
        return launches.lines(i, framed)
    if isinstance(i, CallPython):
        return [_call(i, names)]
    if (x := launches.changed(i)) is not None:
        return [f"v{i.outs[0]} = v{x}", f"changed((v{x},))"]
    return [_view(plan, i)] if is_view(i) else launches.of_call(i, _call(i, names), framed)


def _view(plan: Plan, i: Call) -> str:
    (out,), (base, offset) = i.outs, i.args
    if is_whole(i, plan):
        return f"v{out} = v{base.id}"
    return f"v{out} = view(v{base.id}, {_sizes(plan.specs[out].shape)}, {_sizes(plan.specs[out].stride)}, {offset})"


def _marked(lines: Sequence[str], label: str) -> list[str]:
    """Wrap an instruction in a profiler range."""
    return [f"with range({label}):", *(f"    {line}" for line in lines)]


def _pop(lines: dict[int, str], id: int) -> list[str]:
    return [lines.pop(id)] if id in lines else []


def _asserted(plan: Plan, i: Call) -> Iterator[tuple[int, str]]:
    """Data-dependent sizes that were traced as numbers, each with a check: the program asserted them, and kernels rely on it.
    Some versions of torch drop the assertion from the graph."""
    operator = operator_of(i.target)
    if operator is None or torch.Tag.dynamic_output_shape not in operator.tags:
        return
    for o in i.outs:
        found = plan.specs.get(o)
        if found is not None and any(isinstance(s, int) for s in found.shape):
            sizes = ", ".join(str(s) if isinstance(s, int) else "-1" for s in found.shape)
            yield o, f"    sized(v{o}, ({sizes},), {i.target!r})"


def source(
    plan: Plan, names: Names, launches: _Launches, checked: bool = False, observed: bool = False, label: Label | None = None
) -> str:
    """Generate `prepare` (once per set of weights) and `run` (each call). `checked`: see `firstrun`. `observed`: call
    `observe(k, results)` after the k-th instruction, and with k = -1 before the first. `label`: the profiler label of each
    instruction."""
    lines = []
    if plan.prepare:
        kept = set(plan.prepare_outputs) | set(plan.attributes)
        lines.append(f"def prepare({', '.join(f'v{i}' for i in plan.prepare_inputs)}):")
        believed = {r for i in (*plan.prepare, *plan.instructions) if launches.launches(i) for r in reads(i)}
        lines += _body(plan, plan.prepare, kept, names, launches, believed & plan.specs.keys() if checked else (), framed=False)
        lines.append(f"    return ({''.join(f'v{i}, ' for i in plan.prepare_outputs)})")
        lines.append("")
    given_seeds = seeds(plan)
    lines.append("def run(args):")
    if plan.inputs:
        lines.append(f"    {', '.join(f'v{i}' for i in plan.inputs)}, = args")
    lines.append("    args.clear()")
    lines += [f"    v{i} = on_host(v{i})" for i in plan.inputs if i in given_seeds]
    if checked:
        values = ", ".join(f"{i}: v{i}" for i in (*plan.inputs, *plan.attributes) if i in plan.specs or i in plan.scalars)
        lines.append(f"    check({{{values}}})")
    if plan.prepare:
        left = f"{', '.join(f'v{i}' for i in plan.prepare_outputs)}, = " if plan.prepare_outputs else ""
        lines.append(f"    {left}prepared({', '.join(f'v{i}' for i in plan.prepare_inputs)})")
    keep = {r.id for r in plan.outputs if isinstance(r, Ref)} | set(plan.attributes)
    alone = checked or observed or label is not None  # each instruction is looked at
    relied_on = launches.direct and (launches.bound or any(isinstance(i, Launch) for i in plan.instructions))
    instructions = with_views(plan) if relied_on and not alone else plan.instructions  # a first run has checked the metadata
    symbols = _Symbols(plan, instructions, launches.bound)
    lines += symbols.of(plan.inputs)
    start = ["    observe(-1, ())"] if observed else []
    traced = plan.specs if checked else ()
    queues = () if alone or native.launch_queue() is None else tuple(queued(instructions, launches.kernels, function_of))
    body = _body(plan, instructions, keep, names, launches, traced, symbols, observed, label, queues)
    if launches.bound or any(isinstance(i, Launch) for i in plan.instructions):
        workers = ["    workers = count_workers()"] if launches.blocks and plan.policy.workers else []
        allocate = ["    allocate = allocation()"] if launches.direct else []
        lines += ["    frame = frames.take()", *allocate, *workers, *start, *body]
        lines.append("    frames.give_back(frame)")
    else:
        lines += [*start, *body]
    lines.append(f"    return ({''.join(names.literal(o) + ', ' for o in plan.outputs)})")
    return "\n".join(lines) + "\n"


def load(
    plan: Plan, kernels: Mapping[str, KernelCode] | None = None, checked: bool = False, prepared: PreparedCache | None = None,
    observe: Callable[[int, tuple[Any, ...]], None] | None = None,
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Compile the plan to a callable that takes (and empties) a list of inputs. `prepared`: constants to share with another
    callable of this plan. `observe` receives the position and the results of each instruction that ran."""
    names, launches, text = _written(plan, kernels or {}, native.extension(), checked, observe is not None)
    names.space.update({f"v{i}": value for i, (_, value) in plan.attributes.items()})
    names.space.update(frames=Frames(launches.frame()), fail=fail, empty_strided=torch.empty_strided)
    names.space.update(allocation=_allocation(launches.home), view=compat.view_of_memory, on_host=on_host, draw=draw)
    names.space.update(count_workers=plan.policy.workers, sized=sized, without_memory=without_memory, check=Check(plan))
    names.space.update(changed=torch.autograd.graph.increment_version)
    names.space.update(observe=observe, limited=plan.policy.limit)
    names.space.update(profiling=compat.profiler_flag(), profiled=_profiled(plan, kernels or {}, checked, names.space))
    asking = text.replace(*_ASKS) if observe is None else text  # with `observe`, each instruction is reported anyway
    if plan.alone and plan.policy.limit is not None:
        asking = asking.replace(_RUN, "def crew(args):") + _ALONE
    if (queue := native.launch_queue()) is not None and "open_queue()" in text:
        names.space.update(open_queue=queue.open, close_queue=queue.close)
        asking = asking.replace(_RUN, "def queued(args):") + _QUEUED
    exec(compile(asking, f"<fusewright plan {id(plan):x}>", "exec"), names.space)
    if plan.prepare:
        if prepared is not None and checked:
            prepared.made_by(names.space["prepare"])
        names.space["prepared"] = prepared or PreparedCache(names.space["prepare"])
    run: Callable[[list[Any]], tuple[Any, ...]] = names.space["run"]
    return run


def to_text(plan: Plan, kernels: Mapping[str, KernelCode] | None = None) -> str:
    """The source text of a plan for display: launches appear as Python calls, even if C++ makes them, and calls as calls."""
    return _written(plan, kernels or {}, None, False, False, bound=False)[2]


def _written(
    plan: Plan, kernels: Mapping[str, KernelCode], core: Any | None, checked: bool, observed: bool,
    bound: bool = True,
) -> tuple[Names, _Launches, str]:  # fmt: skip
    """The text of a plan, its namespace, and the contents of its frames."""
    names = Names()
    launches = _Launches(plan, PLACE(plan), kernels, names, core, bound)
    return names, launches, source(plan, names, launches, checked, observed)


_ASKS = "def run(args):\n", f"def run(args):\n    if profiling({compat.PROFILING!r}): return profiled(args)\n"
"""The check for a profiler at the start of every plan: a dict lookup, some 20 nanoseconds."""


_RUN = "def run(args):"

_QUEUED = """
def run(args):
    try:
        return queued(args)
    finally:
        close_queue()
"""
"""What was queued is launched when an instruction raises, too."""

_ALONE = """
def run(args):
    workers = limited(1)
    try:
        return crew(args)
    finally:
        limited(workers)
"""
"""Run a call whose ops are all too short to share on one thread: library loops would split 10 us of work, and beside a busy
process wait milliseconds for a thread without a core."""


def _profiled(
    plan: Plan, kernels: Mapping[str, KernelCode], checked: bool, space: Mapping[str, Any]
) -> Callable[[list[Any]], tuple[Any, ...]]:
    """The same plan with a profiler range around each instruction, generated when first profiled. It shares the contents of
    `space`: frames, constants and the check."""

    @functools.cache
    def made() -> Callable[[list[Any]], tuple[Any, ...]]:
        names = Names()
        launches = _Launches(plan, PLACE(plan), kernels, names, native.extension())
        text = source(plan, names, launches, checked, label=labeler(plan))
        own = {**names.space, **{k: space[k] for k in space.keys() - names.space.keys()}, "range": record_function}
        exec(compile(text, f"<fusewright profiled plan {id(plan):x}>", "exec"), own)
        run: Callable[[list[Any]], tuple[Any, ...]] = own["run"]
        return run

    return lambda args: made()(args)


def prepared_of(run: Callable[..., Any]) -> PreparedCache | None:
    """The prepared constants of a loaded plan, to share with callables of its parts; None if it has none."""
    found: PreparedCache | None = run.__globals__.get("prepared")
    return found


def check_of(run: Callable[..., Any]) -> Check:
    """The check of a plan that was loaded for a first run."""
    found: Check = run.__globals__["check"]
    return found

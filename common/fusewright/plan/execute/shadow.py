"""A traced graph run in eager beside its plan: measured, its results dropped, with no effect on the program but its time.

What the graph writes is written to copies, and random number generators are put back. Graphs whose effects cannot be undone in
this way have no shadow.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves

from fusewright import _torch_compat as compat
from fusewright import machine, storage
from fusewright.graph.effects import communicates, draws, may_share, writes, written
from fusewright.graph.view import is_op, is_projection
from fusewright.interface import HOST, Phase
from fusewright.ops import namespaces
from fusewright.plan import seeds
from fusewright.plan.execute.firstrun import generators
from fusewright.plan.ir import Run

clock = time.perf_counter

CHECKED_EVERY = 8
"""Calls of a graph between two looks at the clock; more often at first, so that a graph of a few long calls is stopped as well."""

ROOM = 2
"""A shadow needs this many times its memory to be free."""


LITTLE = 1 << 26
"""Bytes that are taken without asking."""


class TooLong(Exception):
    """Eager was stopped, because it takes far longer than the plan. `done` is the part of its calls that have run; those that had
    run before took `warm` seconds."""

    def __init__(self, done: float, warm: float) -> None:
        super().__init__(done, warm)
        self.done, self.warm = done, warm


class Unfit(Exception):
    """Eager must not run: there is too little free memory, or an argument has none, which crashes eager's kernels."""


class Eager:
    """A traced graph as eager runs it. Copies the graph now, and generates code when it is first needed."""

    def __init__(self, gm: GraphModule) -> None:
        self._root, self._graph = gm, _copy(gm.graph)
        places = {n: k for k, n in enumerate(self._graph.find_nodes(op="placeholder"))}
        self._written = sorted({places[r] for r in _written_roots(self._graph) if r in places})
        self._seeds = _seed_places(self._graph, places)
        self._drawing = [n.meta.get("val") for n in self._graph.nodes if draws(n)]
        self._measured: Callable[..., Any] | None = None
        self._plain: Callable[..., Any] | None = None
        self._start, self._until, self._before, self._warm = 0.0, math.inf, 0.0, 0.0
        self._bytes = 0
        self._devices: set[str] = set()
        self._held: list[Any] = []

    def run(self, args: list[Any]) -> Any:
        """Run for the caller, in the plan's place."""
        if self._plain is None:
            self._plain = GraphModule(self._root, self._graph).forward
        given = _with_seeds(args, self._seeds)
        args.clear()
        return self._plain(*given)

    def build(self, args: Sequence[Any]) -> None:
        """Generate what `seconds` runs, if there is none yet."""
        if self._measured is None:
            self._bytes = peak_bytes(self._graph)
            self._measured = GraphModule(self._root, _watched(self._graph, self._look)).forward
            found = (*args, *tree_leaves(self._drawing))  # a graph may draw on a device that none of its arguments is on
            self._devices = {str(a.device) for a in found if isinstance(a, torch.Tensor)}
            self._held = [attrgetter(n.target)(self._root) for n in self._graph.find_nodes(op="get_attr")]

    def seconds(self, args: Sequence[Any], limit: float, wait: Callable[[], None], before: float = 0.0) -> float:
        """The time of a run whose effects are undone. Raises `Unfit`, `TooLong` after `limit`, and eager's own errors. The part
        `before` of its calls has run in earlier runs."""
        self.build(args)
        assert self._measured is not None
        odd = (why for t in (*args, *self._held) if isinstance(t, torch.Tensor) and (why := storage.why_not(t)))
        if why := next(odd, ""):
            raise Unfit(f"an argument {why}")
        needed = self._needed(args)
        if needed > LITTLE and needed * ROOM > min(map(free_bytes, self._devices)):
            raise Unfit(f"it may need {needed >> 20} MiB")
        given = self._with_copies(args)
        with _undone(self._devices) if self._drawing else contextlib.nullcontext():
            wait()
            self._start = start = clock()
            self._until, self._before, self._warm = start + limit, before, 0.0
            self._measured(*given)
            wait()
            return clock() - start

    def _look(self, done: float) -> None:
        now = clock()
        if done <= self._before:
            self._warm = now - self._start
        if now > self._until:
            raise TooLong(done, self._warm)

    def _with_copies(self, args: Sequence[Any]) -> list[Any]:
        """The arguments with copies of those that the graph writes, of the same layout in their memory."""
        given = _with_seeds(args, self._seeds)
        memory: dict[int, Any] = {}
        with torch.no_grad():
            for k in self._written:
                t, owner = args[k], compat.storage_id(args[k])
                if owner not in memory:
                    memory[owner] = t.untyped_storage().clone()
                like = torch.empty(0, dtype=t.dtype, device=t.device)
                given[k] = like.set_(memory[owner], t.storage_offset(), t.size(), t.stride())
        return given

    def _needed(self, args: Sequence[Any]) -> int:
        """An estimate: values grow at most with the square of symbolic sizes."""
        tensors = [
            (n.meta.get("val"), a)
            for n, a in zip(self._graph.find_nodes(op="placeholder"), args, strict=True)
            if isinstance(a, torch.Tensor)
        ]
        traced = sum(_bytes(val) for val, _ in tensors)
        grown = max(1.0, sum(a.numel() * a.element_size() for _, a in tensors) / max(1, traced)) ** 2
        copied = sum(args[k].untyped_storage().nbytes() for k in self._written)
        return int(self._bytes * grown) + copied


def unless_wrapped(gm: GraphModule, phase: Phase) -> Callable[[Run], Run]:
    """Return what replaces a plan by eager in calls whose derivatives a plan cannot give: of a backward graph where a gradient has
    no memory, since it only wraps others (a vmap over gradients, as of a vectorized Jacobian), and of an inference graph under
    forward-mode differentiation. Copies the graph now; compiling changes it."""
    if phase == "forward":  # AOTAutograd's function refuses both itself
        return lambda run: run
    graph, inputs = _copy(gm.graph), gm.graph.find_nodes(op="placeholder")
    gradients = [k for k, n in enumerate(inputs) if compat.is_tangent(n)]
    seeded = _seed_places(gm.graph, {n: k for k, n in enumerate(inputs)})
    attributes = {n.target: attrgetter(n.target)(gm) for n in graph.find_nodes(op="get_attr")}
    for n in graph.nodes:
        n.meta = {}  # its FakeTensors are not needed

    def unless(run: Run) -> Run:
        eager: Callable[..., Any] | None = None

        def call(args: list[Any]) -> Any:
            nonlocal eager
            if all(storage.has_pointer(args[k]) for k in gradients) if gradients else not compat.forward_mode():
                return run(args)
            if eager is None:
                eager = GraphModule(attributes, graph).forward
            given = _with_seeds(args, seeded)
            args.clear()
            return eager(*given)

        return call

    return unless


def _seed_places(graph: Graph, places: Mapping[Node, int]) -> list[int]:
    """Positions of the inputs that are seeds."""
    read = {s for n in graph.nodes if is_op(n) for s in seeds.read(n.target, n.args, n.kwargs)}
    return [places[s] for s in read if s in places]


def _with_seeds(args: Sequence[Any], places: Iterable[int]) -> list[Any]:
    """The arguments with seeds where eager reads them: a recorded forward leaves them on the device."""
    given = list(args)
    for k in places:
        given[k] = seeds.on_host(given[k])
    return given


@contextlib.contextmanager
def _undone(devices: set[str]) -> Iterator[None]:
    """Put the random number generators of the host and of these devices back at the end."""
    put_back = generators(devices - {HOST})
    try:
        yield
    finally:
        put_back()


def why_not(graph: Graph) -> str:
    """Why a graph must run exactly once per call, or cannot be timed, or ""."""
    for n in graph.nodes:
        device = n.meta["val"].device.type if isinstance(n.meta.get("val"), torch.Tensor) else HOST
        if not can_wait(device):
            return f"torch cannot wait for the device {device}"
        if n.op in ("call_module", "call_method") or communicates(n):
            return f"it calls {n.target}"
        known = namespaces.only_computes(n.target.namespace) if is_op(n) else compat.computes(n.target)
        if n.op == "call_function" and not known:
            return f"{n.target} may have effects of its own"
    held = any(r.op == "get_attr" for r in _written_roots(graph))
    return "it writes a tensor that the graph holds" if held else ""


def can_wait(device: str) -> bool:
    """Whether torch can wait for the work of a type of device."""
    return device == HOST or hasattr(getattr(torch, device, None), "synchronize")


def _written_roots(graph: Graph) -> set[Node]:
    """The nodes that may own the memory written by the graph."""
    found: set[Node] = set()
    todo = [w for n in graph.nodes if writes(n) for w in written(n)]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            if may_share(node) or is_projection(node) or writes(node):
                todo.extend(node.all_input_nodes)
    return found


def _copy(graph: Graph) -> Graph:
    copied = Graph()
    result = copied.graph_copy(graph, {}, return_output_node=True)
    value = result[0] if isinstance(result, tuple) else result
    copied.output(value)
    return copied


def _watched(graph: Graph, look: Callable[[float], None]) -> Graph:
    """A copy that calls `look` from time to time, with the part of its calls that have run."""
    copied = _copy(graph)
    ops = [n for n in copied.nodes if is_op(n)]
    for k, n in enumerate(ops[:-1], 1):
        if k % CHECKED_EVERY == 0 or k in (2, 4):
            with copied.inserting_after(n):
                copied.call_function(look, (k / len(ops),))
    return copied


def peak_bytes(graph: Graph) -> int:
    """The most bytes that values made by a traced graph occupy at a time."""
    last = {a: n for n in graph.nodes for a in n.all_input_nodes}
    dying: dict[Node, list[Node]] = defaultdict(list)
    for value, reader in last.items():
        dying[reader].append(value)
    held: dict[Node, int] = {}
    now = peak = 0
    for n in graph.nodes:
        if is_op(n) and not may_share(n):
            held[n] = _bytes(n.meta.get("val"))
            now += held[n]
            peak = max(peak, now)
        now -= sum(held.pop(value, 0) for value in (dying[n] if n.users else [*dying[n], n]))
    return peak


def _bytes(value: Any) -> int:
    """The bytes of a traced value, with the sizes that tracing saw."""
    if isinstance(value, torch.Tensor):
        return math.prod(compat.traced_size(s) or 1 for s in value.shape) * value.element_size()
    return sum(map(_bytes, value)) if isinstance(value, tuple | list) else 0


def free_bytes(device: str) -> int:
    """Memory that can be allocated on a device; 0 where that is not known."""
    kind = torch.device(device).type
    module: Any = torch.get_device_module(kind) if kind != HOST else None
    if not hasattr(module, "mem_get_info"):  # the host, or a device that uses the host's memory
        return machine.free_memory()
    return int(module.mem_get_info(device)[0] + module.memory_reserved(device) - module.memory_allocated(device))


def has_room(device: str) -> bool:
    """Whether eager may run something of unknown size on a device, or the host: `ROOM` times the most memory that this process has
    used there is free."""
    module: Any = torch.get_device_module(device) if torch.device(device).type != HOST else None
    on_device = getattr(module, "max_memory_allocated", None)
    used = int(on_device(device)) if on_device is not None else machine.most_memory()
    return ROOM * used <= free_bytes(device)

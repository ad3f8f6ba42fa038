"""What torch saves of a compiled function (`torch.compile(...).aot_compile`): its graph, to be compiled again when it is loaded.

Plans and kernels are of one machine. Where it has compiled the graph before, they come from the plan cache.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule
from torch.utils._pytree import tree_map

from fusewright import _torch_compat as compat

Compile = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Ambient:
    """Modes that a graph was traced under, and that decide what it becomes."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, inputs: Sequence[Any]) -> Ambient:
        kinds = sorted({x.device.type for x in inputs if isinstance(x, torch.Tensor)})
        kinds = [k for k in kinds if torch.amp.is_autocast_available(k)]
        casts = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        return cls(torch.is_grad_enabled(), tuple(casts))

    def again(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.grad))
        for kind, enabled, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
        return stack


class Saved:
    """A compiled graph that torch can save. `compiler` must be picklable."""

    def __init__(self, compiler: Compile, gm: GraphModule, inputs: Sequence[Any]) -> None:
        self.compiler, self.ambient = compiler, Ambient.now(inputs)
        self.graph = GraphModule(gm, _copied(gm.graph))  # compiling changes it
        self.run = compiler(gm, inputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    @classmethod
    def serialize_compile_artifacts(cls, fn: Saved) -> bytes:
        """What torch calls to save it."""
        pickler = compat.graph_pickler()
        graph = pickler.GraphPickler.dumps(fn.graph, pickler.Options(ops_filter=None))
        return pickle.dumps((fn.compiler, fn.ambient, graph))

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> Saved:
        """What torch calls to load it."""
        compiler, ambient, graph = pickle.loads(data)
        gm = compat.graph_pickler().GraphPickler.loads(graph, compat.symbolic_mode())
        gm.recompile()
        inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        with ambient.again():
            return cls(compiler, gm, inputs)


def _bare(x: Any) -> Any:
    """A fake tensor like `x` without its history, gradient and base, which torch cannot pickle."""
    if not isinstance(x, torch.Tensor) or not compat.is_fake(x):
        return x
    made = compat.fake_tensor(compat.fake_mode_of(x), x.shape, x.stride(), x.dtype, str(x.device))
    return made.requires_grad_(x.requires_grad)


def _copied(graph: Graph) -> Graph:
    copied = Graph()
    copied.output(copied.graph_copy(graph, {}))
    for n in copied.nodes:
        if "example_value" in n.meta:
            n.meta["example_value"] = tree_map(_bare, n.meta["example_value"])
    return copied

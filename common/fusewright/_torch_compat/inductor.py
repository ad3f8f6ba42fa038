"""Inductor, as a compiler to compare with."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def inductor_provenance() -> Iterator[list[dict[str, list[str]]]]:
    """For each graph that Inductor compiles in this context: its kernels by name, with the stack traces of their ops, in graph
    order. Empty if this torch does not provide it."""
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
    """Make Inductor treat weights as constants in this context. `options={"freezing": True}` is not enough: Dynamo, which
    decides whether weights are inputs, reads the global configuration."""
    from torch._inductor import config

    return config.patch(freezing=True)


def aot_inductor() -> Any:
    """The module of `aoti_compile_and_package` and `aoti_load_package`, as documented for AOTInductor."""
    import torch._inductor

    return torch._inductor


def inductor_calls(call: Callable[[], Any], rounds: int) -> list[list[tuple[str, float]]]:
    """What runs in each call of an Inductor graph on the host: names of kernels and operators, with seconds, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(rounds):
            call()
    graphs = [e for e in profile.events() or () if e.name.startswith("## Call CompiledFxGraph")]
    graphs.sort(key=lambda e: e.time_range.start)
    children = [sorted(g.cpu_children, key=lambda e: e.time_range.start) for g in graphs]
    return [[(e.name, e.time_range.elapsed_us() * 1e-6) for e in of] for of in children]

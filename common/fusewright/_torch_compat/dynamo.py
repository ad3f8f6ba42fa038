"""Dynamo: what stands in its graphs, and its account of a process's compilations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

DYNAMO = "torch._dynamo"
"""The import done by a process's first compilation: a second of a core. Import it once before forking many processes."""

WHOLE: dict[Any, Any] = {torch._C._nn.scaled_dot_product_attention: torch.ops.aten.scaled_dot_product_attention.default}
"""Functions in Dynamo graphs that are recorded as one operator, though tracing would decompose them."""

CHECKED_IN_PYTHON: frozenset[Any] = frozenset({torch._C._nn.one_hot})
"""Functions in Dynamo graphs whose C++ form skips value checks on FakeTensors; torch has Python forms for them."""

_COMPUTING = frozenset(
    "torch torch._C._nn torch._C._fft torch._C._linalg torch._C._special torch.functional torch.nn.functional "
    "torch._tensor _operator operator math builtins itertools".split()
)
"""Modules whose functions only compute. Other functions in Dynamo graphs may enter a mode, a level of torch.func or the like."""

_SETTERS = ("set_", "_set_", "_enter", "_exit", "manual_seed", "seed", "use_deterministic")


def computes(target: Any) -> bool:
    """Whether a function in a Dynamo graph only computes, so that it is safe to run it, and to run it again later.

    Autocast regions count, because entering one can be detected and undone.
    """
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


def is_module_state(node: torch.fx.Node, example: Any) -> bool:
    """Whether an input of a Dynamo graph is a parameter or buffer of the compiled module."""
    if isinstance(example, torch.nn.Parameter):
        return True
    return (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None


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


def graph_breaks() -> dict[str, int]:
    """Reasons of Dynamo's graph breaks in this process, with their counts."""
    return _counted("graph_break")


def untraced() -> dict[str, int]:
    """What Dynamo could not trace in this process, with counts; includes the reasons of graph breaks."""
    return _counted("unimplemented")


def frames() -> tuple[int, int]:
    """How many functions Dynamo saw in this process, and how many it traced; the others run in plain Python."""
    return tuple(_counted("frames").get(kind, 0) for kind in ("total", "ok"))  # type: ignore[return-value]


def _counted(kind: str) -> dict[str, int]:
    from torch._dynamo.utils import counters

    return {str(what): int(n) for what, n in counters[kind].items()}


def around_compilations(start: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Let Dynamo, if it is imported, call `start` and `end` around its compilations until `torch.compiler.reset`."""
    handler = getattr(sys.modules.get(DYNAMO), "callback_handler", None)
    if handler is not None and start not in handler.start_callbacks:
        handler.register_start_callback(start)
        handler.register_end_callback(end)


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Add a text to the structured trace (TORCH_TRACE), where tlparse shows it beside Dynamo's own."""
    from torch._logging._internal import trace_structured

    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)

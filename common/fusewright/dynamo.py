"""The door that `torch.compile` comes through: one plain function per backend name."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule

from fusewright.errors import BackendUnavailableError, OptionError
from fusewright.interface import HOST

log = logging.getLogger("fusewright")

Entry = Callable[..., Callable[..., Any]]


def entry(name: str) -> Entry:
    """The function that a package registers under `torch_dynamo_backends`, for the backend `name` of its own."""

    def backend(
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        if mode is not None:
            raise OptionError(f"backend {name!r} has no modes; mode={mode!r} is Inductor's. Use options={{...}}.")
        return compile_dynamo(name, gm, example_inputs, options)

    backend.__name__ = backend.__qualname__ = name
    return backend


def compile_dynamo(
    name: str, gm: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None
) -> Callable[..., Any]:
    """Compile a Dynamo graph with a backend; eager when the backend cannot run here, with one line that says why."""
    from fusewright import pipeline, registry
    from fusewright.capture import capture, masks
    from fusewright.config import Options

    cls = registry.info(name).cls
    parsed = Options.parse(options if cls else None, cls)  # nobody knows the options of a plugin that does not load
    try:
        backend = registry.create(name, parsed)
    except BackendUnavailableError as e:
        if parsed.simulate:  # a check that eager would pass is no check
            raise
        _warn_once(f"{e} Eager runs this model.")
        return gm.forward
    if backend.device_type == _device_type(example_inputs):
        backend.prepare()
    comparison = pipeline.comparison(backend, parsed)
    with gc_paused():
        if backend.constant_masks:
            masks.fold(gm)
        return capture.capture(
            gm,
            example_inputs,
            lambda aten, phase, const, mode: pipeline.compile_graph(backend, parsed, aten, phase, const, mode, comparison),
        )


@contextmanager
def gc_paused() -> Iterator[None]:
    """Without Python's collector of cycles: all that is made meanwhile has it walk the whole heap, which takes a quarter of a
    second with torch and a model."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _device_type(example_inputs: Sequence[Any]) -> str:
    """The device that most of the graph runs on: the first tensor that is not on the host, else that."""
    devices = [x.device.type for x in example_inputs if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d != HOST), HOST)


def fusewright(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """`backend="fusewright"`: the best backend that works for the model's device on this machine."""
    from fusewright import registry
    from fusewright.config import env

    device = _device_type(example_inputs)
    name = env("BACKEND") or registry.best(device)
    if name is None:
        _warn_once(f"no installed backend works for {device} here; eager runs this model. See: fusewright doctor")
        return gm.forward
    return entry(name)(gm, example_inputs, options=options, mode=mode)


def best_backend(example_inputs: Sequence[Any]) -> str:
    """The name that "fusewright" stands for with these inputs. Raises `BackendUnavailableError` where nothing works."""
    from fusewright import registry
    from fusewright.config import env

    device = _device_type(example_inputs)
    name = env("BACKEND") or registry.best(device)
    if name is None:
        raise BackendUnavailableError(f"no installed backend works for {device} here. See: fusewright doctor")
    return name


_said: set[str] = set()


def _warn_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        log.warning("fusewright: %s", message)

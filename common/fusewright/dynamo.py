"""The entry point from `torch.compile`: one callable per backend name."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule, Node

from fusewright import _torch_compat as compat
from fusewright.errors import BackendUnavailableError, OptionError, nearest
from fusewright.interface import HOST, Backend, Phase, RuleLog
from fusewright.report import warn_once

if TYPE_CHECKING:
    from fusewright.config import Options

log = logging.getLogger("fusewright")


@dataclass(eq=False)
class Entry:
    """The entry point of a backend. Compiled models are copied and pickled together with it, and Dynamo knows it by identity: there
    is one for each name."""

    name: str

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        _prepare_dynamo()  # again after a reset
        with gc_paused():  # including the imports
            run = partial(compile_dynamo, self.name, options=options, mode=mode)
            if result := compat.saved_result():
                from fusewright.capture.saved import Saved

                result.register(Saved)
                return Saved(run, gm, example_inputs)
            return run(gm, example_inputs)

    @property
    def __name__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], Entry], tuple[str]]:
        return entry, (self.name,)


@cache
def entry(name: str) -> Entry:
    """What a package registers under `torch_dynamo_backends` for its own backend `name`: a callable."""
    _prepare_dynamo()
    return Entry(name)


def compile_dynamo(
    name: str, gm: GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a Dynamo graph with a backend, or fall back to eager with a one-line reason if the backend cannot run here.
    `mode` is torch's: see `config.MODES`."""
    from fusewright import pipeline, registry
    from fusewright.capture import capture, layouts, masks
    from fusewright.capture.tables import host_tables
    from fusewright.plan.execute import broken

    cls = registry.info(name).cls
    parsed = _parsed(cls, options, mode)
    _warn_of_unknown_env()
    try:
        backend = registry.create(name, parsed)
    except BackendUnavailableError as e:
        if parsed.simulate:  # falling back to eager would make the check meaningless
            raise
        warn_once(f"{e} Eager runs this model.")
        return gm.forward
    if _given_fakes(gm, example_inputs):
        return gm.forward
    if backend.device_type == _device_type(example_inputs):
        backend.prepare()
    comparison = pipeline.comparison(backend, parsed)
    if comparison is not None:
        broken.watch(name, comparison.may, example_inputs)
    claims = type(backend).supports is not Backend.supports  # one that claims nothing gives eager's bits
    called = {getattr(n.target, "__name__", n.target) for n in gm.graph.nodes} if claims else set()
    if "_transformer_encoder_layer_fwd" in called:
        from fusewright.rewrite import encoder_layers

        encoder_layers.take_apart(gm)
    masks.simplify(gm, backend)
    if "cumprod" in called:
        from fusewright.capture import gradients

        gradients.simplify(gm)

    def compile_graph(aten: GraphModule, phase: Phase, const: frozenset[Node], mode: str) -> Callable[[list[Any]], Any]:
        compiling.append(phase)
        with gc_paused():  # AOTAutograd compiles the backward graph in the first backward call
            if phase == "infer":  # in training, the joint graph has been rewritten
                host_tables(aten.graph)
            earlier = rules if phase == "forward" else None
            run = pipeline.compile_graph(backend, parsed, aten, phase, const, mode, comparison, earlier)
        compiling.clear()
        return run

    rules: RuleLog | None = None
    compiling: list[Phase] = []  # not empty after an error while a traced graph was compiled

    def without_loops(gm: GraphModule, inputs: Sequence[Any]) -> GraphModule | None:
        from fusewright.capture.loops import may_loop

        if not claims or not may_loop(gm, inputs):
            return None
        from fusewright.rewrite import training

        nonlocal rules
        rules = RuleLog(parsed.disable_rules, parsed.fuel)  # called twice if the graph in other layouts fails: count anew
        return training.rolled(gm, inputs, rules)

    policy = backend.policy() if _here(backend, example_inputs) else None
    given = (n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder"))
    symbolic = any(isinstance(n, torch.SymInt) for x in given if isinstance(x, torch.Tensor) for n in x.shape)
    laid = layouts.preferred(gm, backend)
    if laid is not None:
        try:
            with compat.leaving_transforms(), backend.tracing(symbolic):
                return capture.capture(laid, example_inputs, compile_graph, without_loops, policy)
        except (RuntimeError, ValueError) as e:  # no view with such strides exists
            log.info("a training step keeps eager's layouts: %s", str(e).partition("\n")[0])
    try:
        with compat.leaving_transforms(), backend.tracing(symbolic):
            return capture.capture(gm, example_inputs, compile_graph, without_loops, policy)
    except Exception as e:
        if compiling or type(e) not in REFUSALS or parsed.fallback == "error":
            raise
        first, _, _ = str(e).partition("\n")
        warn_once(f"eager runs a graph that cannot be traced: {first}")
        return gm.forward  # raises its own error, when it is due, or none


REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError)
"""What operators raise for calls that they refuse, or that have no gradient. Dynamo knows what to do with errors derived from
these."""


def _given_fakes(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a caller passes FakeTensors, of another mode than that which traces the graph: they have no memory for a plan to
    read, and calls with other tensors do not pass this graph's guards."""
    given = [compat.fake_mode_of(x) for x in example_inputs if compat.is_fake(x)]
    values = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="placeholder")] if given else []
    traced = [compat.fake_mode_of(x) for x in values if compat.is_fake(x)]
    return bool(traced) and any(mode not in traced for mode in given)


def _here(backend: Backend, example_inputs: Sequence[Any]) -> bool:
    """Whether a graph is of the device that the backend lowers for."""
    simulated = backend.device is not None and backend.device.simulated
    return simulated or backend.device_type == _device_type(example_inputs)


def _parsed(cls: type[Backend] | None, options: Mapping[str, Any] | None, mode: str | None) -> Options:
    """Check the user's options. Explicit options override a mode, and so does a simulation, since a simulated device has no
    speed."""
    from fusewright.config import Options, options_of_mode

    of_mode = options_of_mode(mode, cls)
    if cls is None:  # the options of a plugin that fails to load are unknown
        return Options.parse(None, None)
    parsed = Options.parse(options, cls)
    if of_mode and not parsed.simulate:
        parsed = Options.parse({**of_mode, **(options or {})}, cls)
    given = (options or {}).get("disable_rules", ())
    unknown = [_unknown_rule(id, cls) for id in parsed.disable_rules if id not in _rules(cls)]
    if unknown and given:
        raise OptionError(f"option 'disable_rules': {unknown[0]}")
    for text in unknown:  # the variable may name an option of another backend
        warn_once(f"FUSEWRIGHT_DISABLE_RULE: {text}")
    return parsed


def _rules(cls: type[Backend]) -> set[str]:
    """All rule ids: the host's, those of the rows loaded with backends, and those that this backend adds."""
    from fusewright.rewrite import batches, branches, contractions, grouped, pairs, picked, widen, written
    from fusewright.rewrite.loops import associative, filled, recurrence, repeated, unrolled
    from fusewright.rewrite.rules import RULES
    from fusewright.toolkit.region import pattern

    cls.lowers()  # imports the backend's tables, whose rows register their ids
    modules = (associative, batches, branches, contractions, filled, grouped, pairs, picked, recurrence, repeated, widen, written)
    passes = (m.ID for m in modules)
    host = {"cse", *passes, *(rule.id for rule in (*RULES, *unrolled.RULES))}
    return {*host, *pattern.RULES, *cls.rules}


def _unknown_rule(id: str, cls: type[Backend]) -> str:
    return f"there is no rule {id!r}; {nearest(id, _rules(cls))}"


def _warn_of_unknown_env() -> None:
    """Warn once of each variable with our prefix that nobody reads. Other backends are asked only if there is one."""
    from fusewright import registry
    from fusewright.config import unknown_env

    if unknown_env():
        for name, hint in unknown_env(registry.environment()).items():
            warn_once(f"{name} is not read by anything; {hint}")


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector: allocations would trigger walks of the whole heap, a quarter of a second with
    torch and a model."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


_pause = contextlib.ExitStack()
"""The context that ends with the compilation in progress."""


def _prepare_dynamo() -> None:
    """What tracing needs, before a graph reaches a backend: the collector rests from a compilation's start."""
    compat.read_no_masks()
    compat.around_compilations(_compilation_starts, _compilation_ends)


def _compilation_starts(_: object) -> None:
    if gc.isenabled():
        _pause.enter_context(gc_paused())
        _pause.enter_context(_only_new_objects())


def _compilation_ends(_: object) -> None:
    _pause.close()  # closes nothing if the hooks were set during this compilation


@contextlib.contextmanager
def _only_new_objects() -> Iterator[None]:
    """Collect at the end what has been made in the `with` block, without a walk over the objects that were there before: the block
    makes enough objects for a walk over all to be due."""
    apart = not gc.get_freeze_count()  # else the program has frozen objects, which must stay so
    if apart:
        gc.freeze()
    try:
        yield
    finally:
        if apart:
            gc.collect()
            gc.unfreeze()


def _device_type(example_inputs: Sequence[Any]) -> str:
    """The device that the graph runs on: that of the first tensor not on the host, else the host."""
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
        warn_once(f"no installed backend works for {device} here; eager runs this model. See: fusewright doctor")
        return gm.forward
    return entry(name)(gm, example_inputs, options=options, mode=mode)


def best_backend(example_inputs: Sequence[Any]) -> str:
    """The backend that "fusewright" stands for with these inputs. Raises `BackendUnavailableError` if none works."""
    from fusewright import registry
    from fusewright.config import env

    device = _device_type(example_inputs)
    name = env("BACKEND") or registry.best(device)
    if name is None:
        raise BackendUnavailableError(f"no installed backend works for {device} here. See: fusewright doctor")
    return name

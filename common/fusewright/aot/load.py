"""Load a file into a callable: authenticate it, compare it with this machine and model, restore it, warm it up. Nothing is
traced or compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from fusewright import _torch_compat as compat
from fusewright import registry
from fusewright.aot import calls, file, identity
from fusewright.aot.calls import Leaf
from fusewright.aot.identity import Model
from fusewright.aot.watch import Watch, settings
from fusewright.config import Options
from fusewright.errors import ArtifactError, FusewrightError, printable
from fusewright.interface import HOST, Backend
from fusewright.plan import serial, verify, vocabulary
from fusewright.plan.execute import codegen
from fusewright.plan.ir import Run
from fusewright.plan.replay.inference import replayed

log = logging.getLogger("fusewright")

FORMAT = 2
Otherwise = Literal["error", "compile"]
Holder = tuple[dict[str, Any], str]
"""Where a module stores a tensor: its dictionary and the name in it."""


_AGAIN = "Save the model as it is now, and load that"


@dataclass(frozen=True)
class Program:
    """One saved call. `weights` are (position among the inputs, holder, name, expected type)."""

    leaves: tuple[Leaf, ...]
    takes: Any
    gives: Any
    places: tuple[int, ...]
    """For each input, the index of its leaf in the call; -1 if it is none."""
    weights: tuple[tuple[int, Holder, str, Leaf], ...]
    constants: tuple[tuple[int, torch.Tensor], ...]
    run: Run
    device: torch.device | None = None
    """Where all weights lie that are not on the host; None without such."""
    seen: list[Any] = field(default_factory=list)
    """Which weights the last call had, and where in memory: at most one such."""

    def fits(self, leaves: Sequence[Any], spec: Any) -> bool:
        return spec == self.takes and all(leaf.fits(x) for leaf, x in zip(self.leaves, leaves, strict=True))

    def given(self, leaves: Sequence[Any]) -> list[Any]:
        """The inputs of the plan in a call. Raises `ArtifactError` for what is not as it was saved."""
        given: list[Any] = [None if at < 0 else calls.laid_out(leaves[at], self.leaves[at]) for at in self.places]
        weights: list[Any] = [held.get(key) for _, (held, key), _, _ in self.weights]
        now = _locations(weights)
        known = now is not None and now in self.seen
        for weight, (k, _, name, leaf) in zip(weights, self.weights, strict=True):
            if not (leaf.looks_like(weight) if known else leaf.is_of(weight)):
                raise ArtifactError(
                    f"the weight {name!r} was {leaf} with strides {list(leaf.stride)} when the program was saved, and is now "
                    f"{calls.text(weight)}{f' with strides {list(weight.stride())}' * leaf.fits(weight)}. {_AGAIN}"
                )
            given[k] = weight
        if not known:
            self.seen[:] = [now]
        for k, value in self.constants:
            given[k] = value
        check_device(given, self.device)
        return given

    def of(self, module: torch.nn.Module) -> Program:
        """The same program with the weights of `module`, wherever its modules keep them now. Raises `ArtifactError`."""
        weights = tuple((k, _holder(module, name, leaf), name, leaf) for k, _, name, leaf in self.weights)
        return replace(self, weights=weights, device=_device(weights), seen=[])

    def __call__(self, given: list[Any]) -> Any:
        return compat.pytree.tree_unflatten(self.run(given), self.gives)


def _locations(weights: Sequence[Any]) -> tuple[list[Any], ...] | None:
    """The identities of these tensors and their addresses; None if not all have an address."""
    try:
        return list(map(id, weights)), list(map(type, weights)), list(map(torch.Tensor.data_ptr, weights))
    except (RuntimeError, TypeError):
        return None


def check_device(given: Sequence[torch.Tensor], device: torch.device | None) -> None:
    """Require that tensors off the host are on one device. Raises `ArtifactError`."""
    for x in given:
        if x.device.type != HOST:
            device = device or x.device
            if x.device != device:
                raise ArtifactError(f"one tensor is on {x.device}, another on {device}. Move the model and its inputs to one")


@dataclass(frozen=True)
class _State:
    """A model as it was when it was last compared with the file, and programs that read its weights where they were then. `why`:
    what differed, or ""."""

    watch: Watch
    programs: tuple[Program, ...]
    why: str = ""


class Loaded:
    """A model whose calls run saved programs, without gradients. Safe for concurrent calls."""

    def __init__(
        self, model: torch.nn.Module, as_loaded: Model, programs: Sequence[Program], compiled: Callable[[], Any] | None
    ) -> None:
        self._model = model
        self._compile, self._compiled = compiled, None
        self._parts, self._settings = as_loaded.parts, settings()
        self._state = _State(Watch(as_loaded), tuple(programs))

    @property
    def model(self) -> torch.nn.Module:
        return self._model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = calls.flatten(args, kwargs)
        with torch.no_grad():
            if why := _obstacle(self._settings):
                return self._otherwise(why)(*args, **kwargs)
            state = self._state
            if not state.watch.holds():
                self._state = state = self._compared()
            if state.why:
                return self._otherwise(state.why)(*args, **kwargs)
            program = next((p for p in state.programs if p.fits(leaves, spec)), None)
            if program is None:
                return self._otherwise(_misfit(leaves, spec, state.programs))(*args, **kwargs)
            try:
                given = program.given(leaves)
            except ArtifactError as e:
                return self._otherwise(str(e))(*args, **kwargs)
            return program(given)

    def _compared(self) -> _State:
        """Compare the model as it is now with the one that was loaded. Source files are not read again: their code runs as it
        was imported."""
        found, programs = identity.of_model(self._model, read=False), self._state.programs
        then = {k: v for k, v in self._parts.items() if k in found.parts}
        watch, changes = Watch(found), list(islice(identity.differences(then, found.parts), 4))
        try:
            if not changes:
                return _State(watch, tuple(p.of(self._model) for p in programs))
        except ArtifactError as e:  # a weight has other strides, which the program relies on
            changes = [str(e)]
        return _State(watch, programs, f"the model changed since the program was loaded: {_some(changes)}. {_AGAIN}")

    def _otherwise(self, message: str) -> Any:
        """What runs a call instead of a program; `message` says why, and ends with a way to mend it."""
        if self._compile is None:
            raise ArtifactError(f"{message}, or load(..., otherwise='compile')")
        if self._compiled is None:
            log.warning("fusewright: %s. This call is compiled", message)
            self._compiled = self._compile()
        return self._compiled

    def warm_up(self) -> None:
        """Run every program once, on zeros and ones, so that weights are packed and libraries have done their first-call setup."""
        with torch.no_grad(), torch.random.fork_rng(devices=[]), compat.disable_autocast():
            for program in self._state.programs:
                try:
                    program(program.given([_filled(leaf, program.device) for leaf in program.leaves]))
                except (RuntimeError, IndexError, ValueError) as e:  # the model itself may reject such values
                    log.info("a program was not warmed up: %s", printable(e)[:200])


def _some(changes: Sequence[str]) -> str:
    return f"{'; '.join(changes[:3])}{' ...' * (len(changes) > 3)}"


def _obstacle(as_loaded: tuple[Any, ...]) -> str:
    """Why no program may run now, whatever its model, or "": modes among them, under which nothing else can be relied on."""
    if compat.autocast_enabled():  # it would cast operands of a program's calls, whose types are fixed
        return "saved programs run without autocast: leave it"
    if (now := settings()) == as_loaded:
        return ""
    was, those = " ".join(map(str, as_loaded)), " ".join(map(str, now))
    return f"settings of torch were {was} when the program was loaded, are {those}. Restore them"


def _misfit(leaves: Sequence[Any], spec: Any, programs: Sequence[Program]) -> str:
    asked = calls.call_text(list(map(calls.text, leaves)), spec)
    held = "; ".join(calls.call_text(list(map(str, p.leaves)), p.takes) for p in programs)
    return f"no saved program takes ({asked}); there are: {held}. Save one for this call too"


def _filled(leaf: Leaf, device: torch.device | None) -> Any:
    if leaf.dtype is None:
        return leaf.value
    where = leaf.device if device is None or leaf.device == HOST else device
    made = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=where)
    return made.fill_(1 if leaf.dtype.is_floating_point or leaf.dtype is torch.bool else 0)


def load(model: Any, path: str | Path, sha256: str | None, otherwise: Otherwise, warm_up: bool) -> Any:
    """See `fusewright.load`."""
    if otherwise not in ("error", "compile"):
        raise ArtifactError(f"otherwise is 'error' or 'compile', not {otherwise!r}")
    module, compiled_by, compiled_with = compat.compiled_module(model)
    head, blobs = file.read(Path(path), sha256)
    name = str(head.get("backend", compiled_by or "fusewright"))
    options = head.get("options") if isinstance(head.get("options"), dict) else compiled_with

    def compiled() -> Any:
        return torch.compile(module, backend=name, options=options or None)

    try:
        programs, found = _programs(module, name, head, blobs)
    except ArtifactError as e:
        if otherwise == "error":
            raise ArtifactError(f"{path}: {e}") from e.__cause__
        log.warning("fusewright: %s: %s; the model is compiled instead", path, e)
        return compiled()
    loaded = Loaded(module, found, programs, compiled if otherwise == "compile" else None)
    if warm_up:
        loaded.warm_up()
    return loaded


def _programs(
    module: torch.nn.Module, name: str, head: Mapping[str, Any], blobs: Sequence[bytes]
) -> tuple[list[Program], Model]:
    """Restore the programs. Raises `ArtifactError` that names what does not fit and how to fix it."""
    if head.get("format") != FORMAT:
        raise ArtifactError("it is of another version of Fusewright; save it again")
    try:
        cls = registry.info(name).cls
        backend = registry.create(name, Options.parse(head["options"], cls))
    except (FusewrightError, KeyError) as e:
        raise ArtifactError(f"it is for backend {name!r}: {e}") from e
    _compare("this machine or what is installed on it", head.get("machine"), identity.of_machine(backend))
    model = head.get("model")
    files = model.get("files") if isinstance(model, dict) else None
    found = identity.of_model(module, files if isinstance(files, dict) else ())
    _compare("the model", model, found.parts)
    if head.get("threads") != backend.policy().count_workers():
        log.info(
            "a program was measured with %s threads; here are %d", head.get("threads"), backend.policy().count_workers()
        )
    backend.prepare()
    try:
        return [_restored(module, backend, p, blobs) for p in head["programs"]], found
    except ArtifactError:
        raise
    except Exception as e:  # whatever malformed data causes; nothing of it has run
        raise ArtifactError(f"it cannot be restored ({type(e).__name__}: {printable(e)[:200]}); save it again") from e


def _compare(what: str, then: Any, now: Mapping[str, Any]) -> None:
    found = list(islice(identity.differences(then if isinstance(then, dict) else {}, now), 4))
    if found:
        raise ArtifactError(f"it was saved for another state of {what}: {_some(found)}. Save it again here")


def _restored(module: torch.nn.Module, backend: Backend, data: Mapping[str, Any], blobs: Sequence[bytes]) -> Program:
    plan = serial.from_data(data["plan"], _nothing)
    plan.policy = backend.policy()
    for problem in vocabulary.find_problems(plan, vocabulary.Words(frozenset(), backend.namespaces)):
        raise vocabulary.Foreign(problem)
    code = blobs[data["code"]]
    kernels = backend.restore(code, list(plan.kernels)) if code else {}
    verify.check(plan, "reading it", {h: c.kernel for h, c in kernels.items()})
    leaves = tuple(map(Leaf.from_data, data["leaves"]))
    takes, gives = compat.pytree.treespec_loads(data["takes"]), compat.pytree.treespec_loads(data["gives"])
    if (
        len(plan.inputs) != len(data["inputs"])
        or gives.num_leaves != len(plan.outputs)
        or takes.num_leaves != len(leaves)
    ):
        raise ValueError("its plan takes or gives another number of values")
    places, weights, constants = [], [], []
    for k, (kind, key, what) in enumerate(data["inputs"]):
        leaf = Leaf.from_data(what)
        _check_spec(plan.specs.get(plan.inputs[k]), leaf)
        places.append(int(key) if kind == "leaf" else -1)
        if kind == "weight":
            weights.append((k, _holder(module, str(key), leaf), str(key), leaf))
        elif kind == "constant":
            constants.append((k, _tensor(blobs[key], leaf, _device(weights))))
        elif leaves[key] != leaf:
            raise ValueError("an input is not what its call gives")
    run = codegen.load(plan, kernels)
    run = replayed(plan, kernels, run, backend.recorder(), log.debug)
    where = _device(weights)
    return Program(leaves, takes, gives, tuple(places), tuple(weights), tuple(constants), run, where)


def _device(weights: Sequence[tuple[int, Holder, str, Leaf]]) -> torch.device | None:
    """The device of the first weight that is not on the host."""
    return next((held[key].device for _, (held, key), _, leaf in weights if leaf.device != HOST), None)


def _nothing(name: str) -> Any:
    raise vocabulary.Foreign(f"the plan asks for {name!r}, which no file holds")


def _check_spec(spec: Any, leaf: Leaf) -> None:
    """Require that the plan assumes of an input only what every call checks."""
    if spec is not None and (tuple(spec.shape), tuple(spec.stride), spec.dtype) != (
        leaf.shape,
        leaf.stride,
        leaf.dtype,
    ):
        raise ValueError("its plan and its signature differ")


def _holder(module: torch.nn.Module, name: str, leaf: Leaf) -> Holder:
    """Find where the model stores a weight, and require the type that the program was compiled for."""
    path, _, last = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as e:
        raise ArtifactError(f"the model has no weight {name!r}: it is another model than was saved") from e
    held: dict[str, Any] = owner._parameters if last in owner._parameters else owner._buffers
    found = held.get(last)
    if found is None:
        raise ArtifactError(f"the model has no weight {name!r}: it is another model than was saved")
    if not leaf.is_of(found):
        raise ArtifactError(f"the weight {name!r} is {calls.text(found)}; saved was {leaf} with strides {list(leaf.stride)}")
    return held, last


def _tensor(data: bytes, leaf: Leaf, device: torch.device | None) -> torch.Tensor:
    made = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device=HOST)
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device=HOST)
    made.reshape(-1).view(torch.uint8).copy_(raw)
    return made.to(leaf.device if device is None or leaf.device == HOST else device)

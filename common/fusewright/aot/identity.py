"""What a saved program depends on: its model, the machine and the installed software, with differences described in words."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from fusewright import _torch_compat as compat
from fusewright import machine
from fusewright.aot.describe import Describer, functions, name_of
from fusewright.cache.key import switches
from fusewright.interface import Backend
from fusewright.version import __version__

Parts = dict[str, Any]
_OWN = frozenset({*vars(torch.nn.Module()), "_compiled_call_impl"}) - {"training"}
"""Attributes in which torch keeps the parts of a module."""
_TRACED = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_tracer_cls", "_tracer_extras", "meta"})
"""The same of a traced module, which is described by its code."""
_NO_MODEL = frozenset({"torch", "fusewright"}) | sys.stdlib_module_names - {"__main__"}
"""Packages whose code is none of a model's, or is compared otherwise."""
_INSTALLED = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class Model:
    """What results of a model depend on besides the values of its weights, as data, and the objects that it was read from."""

    parts: Parts
    modules: tuple[torch.nn.Module, ...]
    kinds: tuple[type, ...]
    seen: Describer


def of_machine(backend: Backend) -> Parts:
    """Everything that machine code and the choice of kernels depend on."""
    vendor = type(backend).__module__.partition(".")[0]
    return {
        "torch": str(torch.__version__),
        "fusewright": __version__,
        "python": platform.python_version(),
        "architecture": platform.machine(),
        "device, its features and libraries": backend.fingerprint(),
        "settings of torch": switches(),
        "modes": list(compat.modes()),
        "installed files": "".join(map(machine.sources, ("fusewright", "fusewright_native", vendor))),
    }


def of_model(model: torch.nn.Module, files: Iterable[str] = (), read: bool = True) -> Model:
    """The structure of a model: classes, attributes, hooks, weights by name and type, code; not the values of its weights. The
    data is equal for an equal model of another process. `read`: with the source files of its classes and of the Python modules
    `files`, and versions of packages."""
    named = list(model.named_modules(remove_duplicate=False))
    weights = dict(_weights(named))
    names = {id(x): name for name, x in (*reversed(weights.items()), *reversed(named)) if x is not None}
    seen = Describer(names)
    kinds = dict(reversed([(k, name) for name, m in reversed(named) for k in _classes(type(m))]))
    defining = {k.__module__ for k in kinds if not _is_torchs(k)}
    packages = sorted({f.partition(".")[0] for f in defining} - {"__main__"})
    parts = {
        "class": name_of(type(model)),
        "modules": {name: name_of(type(m)) for name, m in named},
        "settings": {name: seen.attributes(_settings(m), name) for name, m in named if names[id(m)] == name},
        "hooks": dict(_hooks(named, seen)),
        "weights": {name: "None" if x is None else _form(x) for name, x in weights.items()},
        "shared weights": {n: names[id(x)] for n, x in weights.items() if x is not None and names[id(x)] != n},
        "code": dict(_code(kinds, seen)),
    }
    if read:
        parts |= {"files": files_of({*files, *defining}), "packages": {p: _version(p) for p in packages}}
    return Model(parts, tuple(m for _, m in named), tuple(kinds), seen)


def files_of(modules: Iterable[str]) -> Parts:
    """The source files of Python modules, as hashes."""
    return {f: _file(f) for f in sorted(modules)}


@contextlib.contextmanager
def code_that_runs() -> Iterator[set[str]]:
    """Collect the names of the Python modules whose functions run in this context, but for torch and installed packages."""
    found: set[str] = set()
    known: set[CodeType] = set()
    before = sys.getprofile()

    def saw(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code not in known:
            known.add(frame.f_code)
            name = str(frame.f_globals.get("__name__", ""))
            file, ours = frame.f_code.co_filename, name.partition(".")[0] not in _NO_MODEL and name in sys.modules
            if ours and frame.f_code.co_name != "<module>" and file[0] != "<" and _INSTALLED.isdisjoint(Path(file).parts):
                found.add(name)

    sys.setprofile(saw)
    try:
        yield found
    finally:
        sys.setprofile(before)


def differences(then: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """One line for each leaf that differs."""
    for key in dict.fromkeys((*then, *now)):
        a, b = then.get(key), now.get(key)
        where = f"{path}{key}"
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{where}: ")
        elif a != b:
            yield f"{where} was {_short(a)}, is {_short(b)}"


def _short(x: Any) -> str:
    text = "absent" if x is None else str(x)
    return text if len(text) < 80 else f"{text[:60]}..."


def _weights(named: Iterable[tuple[str, torch.nn.Module]]) -> Iterator[tuple[str, Any]]:
    for prefix, m in named:
        for name, x in (*m._parameters.items(), *m._buffers.items()):
            yield f"{prefix}.{name}" if prefix else name, x


def _form(x: torch.Tensor) -> str:
    kind = "parameter" if isinstance(x, torch.nn.Parameter) else "buffer"
    shape = "" if x.is_nested else list(x.shape)
    kind += "" if type(x) in (torch.Tensor, torch.nn.Parameter) else f" of {name_of(type(x))}"
    return f"{kind} {str(x.dtype).removeprefix('torch.')}{shape} on {x.device.type}"


def _settings(module: torch.nn.Module) -> Parts:
    """The attributes of a module that are neither weights nor modules of its own."""
    skipped = _OWN | _TRACED if isinstance(module, torch.fx.GraphModule) else _OWN
    return {k: v for k, v in vars(module).items() if k not in skipped}


def _hooks(named: Iterable[tuple[str, torch.nn.Module]], seen: Describer) -> Iterator[tuple[str, Any]]:
    """What runs before and after modules, in order; the names of those that run at every module come first."""
    every = [("before every module", compat.hooks_of_all()[0]), ("after every module", compat.hooks_of_all()[1])]
    of_one = [(f"{when} {n}", h) for n, m in named for when, h in (("before", m._forward_pre_hooks), ("after", m._forward_hooks))]
    for where, held in (*every, *of_one):
        if held:
            yield where, [seen.value(f, f"hook {where}") for f in held.values()]


def _classes(kind: type) -> list[type]:
    return [k for k in kind.__mro__ if k not in (torch.nn.Module, torch.fx.GraphModule, object)]


def _is_torchs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"


def _code(kinds: Mapping[type, str], seen: Describer) -> Iterator[tuple[str, Any]]:
    """What classes define; of torch's only `forward`, which others may have replaced. `kinds` are the first modules of each."""
    taken: set[str] = set()
    for kind, module in kinds.items():
        held = functions(kind)
        if _is_torchs(kind):
            held = {k: held[k] for k in ("forward",) if k in held}
        name = name_of(kind)
        where = f"{name} of {module}" if name in taken else name  # each traced module has a class, and all have one name
        taken.add(name)
        yield where, seen.attributes(held, name)


def _file(module: str) -> str:
    """A hash of the source file of a Python module; "" if there is none. Nothing is imported."""
    try:
        path = getattr(sys.modules[module], "__file__", None) if module in sys.modules else _origin(module)
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
    except (OSError, ImportError, ValueError):
        return ""


def _origin(module: str) -> Path | None:
    """Where a module would be imported from; `find_spec` of a dotted name would import its package."""
    first, *rest = module.split(".")
    spec = importlib.util.find_spec(first) if all(map(str.isidentifier, (first, *rest))) else None
    if spec is None or not rest:
        return Path(spec.origin) if spec is not None and spec.origin else None
    bases = [Path(root, *rest) for root in spec.submodule_search_locations or ()]
    return next((p for b in bases for p in (b.with_suffix(".py"), b / "__init__.py") if p.is_file()), None)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

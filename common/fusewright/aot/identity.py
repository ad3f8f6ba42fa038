"""What a saved program depends on: its model, the machine and the installed software, with differences described in words."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from fusewright import machine
from fusewright.cache.key import switches
from fusewright.interface import Backend
from fusewright.version import __version__

Parts = dict[str, Any]
_PLAIN = (bool, int, float, str, type(None))
_IDLE = frozenset({"transformers_version", "_name_or_path", "name_or_path"})
"""Configuration entries that affect no computation."""


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
        "installed files": "".join(map(machine.sources, ("fusewright", "fusewright_native", vendor))),
    }


def of_model(model: torch.nn.Module) -> Parts:
    """The structure of a model: classes, plain attributes, configuration, code; not the values of its weights."""
    modules = list(model.named_modules(remove_duplicate=False))
    kinds = sorted({type(m) for _, m in modules}, key=_name_of)
    packages = sorted({k.__module__.partition(".")[0] for k in kinds} - {"torch", "__main__"})
    return {
        "class": _name_of(type(model)),
        "modules": {name: _name_of(type(m)) for name, m in modules},
        "settings": {name: found for name, m in modules if (found := _settings(m))},
        "code": {_name_of(k): _code(k) for k in kinds if not k.__module__.startswith("torch.")},
        "packages": {p: _version(p) for p in packages},
    }


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


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _settings(module: torch.nn.Module) -> Parts:
    """Attributes with plain values, and the configuration if there is one."""
    found = {k: _plain(v) for k, v in vars(module).items() if not k.startswith("_") and _is_plain(v)}
    config: Any = vars(module).get("config")
    if hasattr(config, "to_dict"):
        known = {k: v for k, v in config.to_dict().items() if k not in _IDLE}
        found["config"] = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
    return found


def _is_plain(x: Any) -> bool:
    return isinstance(x, (*_PLAIN, torch.dtype)) or (isinstance(x, tuple | list) and all(map(_is_plain, x)))


def _plain(x: Any) -> Any:
    """Convert a value to the form in which JSON returns it."""
    if isinstance(x, tuple | list):
        return [_plain(v) for v in x]
    return str(x) if isinstance(x, torch.dtype) or (isinstance(x, float) and x != x) else x


def _code(kind: type) -> str:
    """A hash of the source file of a class; "" if there is none."""
    try:
        return hashlib.sha256(Path(inspect.getfile(kind)).read_bytes()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""

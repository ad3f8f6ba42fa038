"""C0: requirements on every backend before it computes anything: imports, probe, claims and fingerprint."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch

from fusewright import registry
from fusewright.conformance import imports, isolated, models
from fusewright.conformance.settings import Settings, compiler
from fusewright.conformance.verdicts import Check, Verdict
from fusewright.interface import Backend, Device, OpView, Unavailable, Why
from fusewright.interface import Verdict as Answer

LEVEL = "C0"
SECONDS = 300
"""Time limit for one process of a check."""


def names(settings: Settings) -> list[str]:
    return list(CHECKS)


def check(name: str, settings: Settings) -> Iterator[Check]:
    found = CHECKS[name](settings)
    yield Check(LEVEL, name, Verdict.ERROR if found else Verdict.PASSED, found)


def _loads(settings: Settings) -> str:
    """The entry point returns a class that fits this host."""
    info = registry.info(settings.backend)
    return "" if info.cls is not None or isinstance(info.device, Device) else info.device.reason


def _isolated(settings: Settings, seed: str = "1") -> dict[str, str]:
    """The report of a fresh process without the vendor's libraries (`fusewright.conformance.isolated`)."""
    plugin = registry.plugins()[settings.backend]
    command = [sys.executable, "-m", isolated.__name__, plugin.name, plugin.value]
    simulate = ["--simulate"] if settings.simulate else []
    env = {**os.environ, "PYTHONHASHSEED": seed}
    return _report((*command, *simulate), frozenset(env.items()))


@functools.lru_cache(2)
def _report(command: tuple[str, ...], env: frozenset[tuple[str, str]]) -> dict[str, str]:
    """Three checks read the same reports."""
    done = subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=SECONDS, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode or not last.startswith("{"):
        return {"import": f"the process ended with {done.returncode}: {done.stderr.strip()[-300:]}"}
    found: dict[str, str] = json.loads(last)
    return found


def _imports(settings: Settings) -> str:
    """The package can be imported where the vendor's libraries are not installed."""
    return _isolated(settings)["import"]


def _probes(settings: Settings) -> str:
    """`probe` answers here and without the vendor's libraries, the same each time."""
    cls = settings.plugin()
    first, second = cls.probe(), cls.probe()
    if first != second:
        return f"probe() gave {first}, then {second}"
    if isinstance(first, Unavailable) and not (first.reason and first.fix):
        return "probe() gave Unavailable without a reason and a fix"
    if not isinstance(first, Device | Unavailable):
        return f"probe() gave {type(first).__name__}, not Device or Unavailable"
    return _isolated(settings).get("probe", "")


def _fingerprints(settings: Settings) -> str:
    """Two processes, whose sets have different orders, return the same fingerprint."""
    settings.make()
    found = {seed: _isolated(settings, seed).get("fingerprint", "none") for seed in ("1", "2")}
    here = settings.make().fingerprint()
    if here != settings.make().fingerprint():
        return "two instances in one process differ"
    return "" if len(set(found.values())) == 1 else f"two processes differ: {found['1']!r} and {found['2']!r}"


def _imports_what_is_public(settings: Settings) -> str:
    """The package's sources do not import non-public modules of the host."""
    top = registry.plugins()[settings.backend].value.partition(":")[0].partition(".")[0]
    if top == "fusewright":  # the host's own reference backends
        return ""
    spec = find_spec(top)
    places = list(spec.submodule_search_locations or [os.path.dirname(spec.origin or "")]) if spec else []
    files = sorted(p for place in places for p in Path(place).rglob("*.py"))
    found = {p.name: imports.not_public(imports.imports(p.read_text(encoding="utf-8"))) for p in files}
    return "; ".join(f"{name} imports {', '.join(what)}" for name, what in found.items() if what)


@functools.lru_cache(1)
def _asked(settings: Settings) -> tuple[Backend, list[tuple[OpView, Answer]]]:
    """A backend, and its answers for each op of the small models."""
    backend, seen = settings.make(), []
    own = backend.supports

    def supports(op: OpView) -> Answer:
        answer = own(op)
        seen.append((op, answer))
        return answer

    backend.supports = supports  # type: ignore[method-assign]
    for name in list(models.MODELS)[:: 4 * settings.part]:
        torch.compiler.reset()
        model = models.build(name, settings.tensors_on())
        models.outputs(model, torch.compile(model.module, backend=compiler(backend, settings.options())))
    del backend.supports
    return backend, seen


def _supports(settings: Settings) -> str:
    """`supports` returns a verdict with a reason, the same when asked again, in another order, or of another instance."""
    backend, seen = _asked(settings)
    other = settings.make()
    for op, answer in reversed(seen):
        if not isinstance(answer, Answer):
            return f"supports({op.op}) gave {type(answer).__name__}, not a Verdict"
        if backend.supports(op) != answer or other.supports(op) != answer:
            return (
                f"supports({op.op}) gave {answer}, then {backend.supports(op)}; another instance {other.supports(op)}"
            )
        if answer.why is Why.CARRIED and not answer.detail:
            return f"supports({op.op}) carries without a reason"
    return ""


def _lowers(settings: Settings) -> str:
    """Every op that `supports` accepts is listed in `lowers()`, if the class implements it."""
    said = settings.plugin().lowers()
    if said is None:
        return ""
    _, seen = _asked(settings)
    missing = sorted({op.op for op, answer in seen if answer.why is Why.OK} - set(said))
    return f"claimed, but not in lowers(): {', '.join(missing)}" if missing else ""


CHECKS: dict[str, Callable[[Settings], str]] = {
    "loads": _loads,
    "imports without the vendor's libraries": _imports,
    "probe is total": _probes,
    "imports only what is public": _imports_what_is_public,
    "fingerprint is equal in two processes": _fingerprints,
    "supports is pure": _supports,
    "claims stand in lowers()": _lowers,
}
"""By name: a function that returns what is wrong, or ""."""

NEED_NO_DEVICE = ("loads", "imports without the vendor's libraries", "probe is total", "imports only what is public")

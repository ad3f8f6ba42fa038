"""The findings of `doctor`, as plain data: the machine, the cache, the environment and every backend."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fusewright import __version__, config, machine, registry
from fusewright.cache import place, store
from fusewright.errors import counted
from fusewright.interface import INTERFACE, OPSET, Unavailable
from fusewright.plan import native

SCHEMA = 1
SMOKE = (sys.executable, "-m", "fusewright.cli.smoke")
SMOKE_SECONDS = 180
SIMULATED = "simulated on CPU, no such device here"
"""The label of a backend whose own code ran, but not on its hardware."""


@dataclass
class Row:
    """One backend. Four separate questions: installed, loads, has a device, runs."""

    name: str
    dist: str
    version: str
    reference: bool
    loads: bool
    device: str | None
    simulated: bool
    lowers: int | None
    runs: bool | None = None
    ms: float | None = None
    first_ms: float | None = None
    chosen: bool = False
    reason: str = ""
    fix: str = ""
    broken: bool = False
    clashes: tuple[str, ...] = ()


@dataclass
class Report:
    """Everything that `doctor` prints. A broken backend or any of `problems` makes it exit with 1."""

    machine: dict[str, Any]
    rows: list[Row]
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and not any(r.broken for r in self.rows)

    def as_json(self) -> str:
        return json.dumps({"schema": SCHEMA, "ok": self.ok, **asdict(self)}, indent=2)


def collect(smoke: bool = True) -> Report:
    """Collect everything. With `smoke`, every backend with a device computes something."""
    rows = [_row(i) for i in registry.backends()]
    report = Report(machine_facts(), rows)
    if smoke:
        run_smoke([r for r in rows if r.device and not r.reference])
    judge(report)
    return report


def _row(info: registry.BackendInfo) -> Row:
    plugin, device = info.plugin, info.device
    lowers = info.lowers
    row = Row(
        name=plugin.name, dist=plugin.dist, version=plugin.version, reference=plugin.reference,
        loads=info.cls is not None, device=None, simulated=False,
        lowers=None if lowers is None else len(lowers), clashes=plugin.clashes,
    )  # fmt: skip
    if isinstance(device, Unavailable):
        row.reason, row.fix, row.broken = device.reason, device.fix, info.cls is None
        stand_in = info.cls.simulated(info.cls.options) if info.cls else device
        if isinstance(stand_in, Unavailable):
            return row
        device = stand_in
    row.device = f"{device.type} {device.arch}" if device.type != device.arch else device.type
    row.simulated = device.simulated
    if row.simulated:
        return row
    row.chosen = info.cls is not None and registry.best(info.cls.device_type) == row.name
    if lowers == ():
        row.reason = "lowers nothing yet: everything runs in eager"
    elif info.cls is not None:
        row.reason = info.cls.remark()
    return row


def run_smoke(rows: Sequence[Row]) -> None:
    """Fill in `runs`. If the child process dies, the backend running in it is blamed, and a new child takes the rest."""
    todo = {r.name: r for r in rows}
    while todo:
        events, ending = _child(list(todo))
        running = None
        for e in events:
            if e["event"] == "start":
                running = e["name"]
                continue
            row = todo.pop(e["name"])
            row.runs, row.ms, row.first_ms = e["ok"], e.get("ms"), e.get("first_ms")
            row.broken, row.reason = not e["ok"], e["error"] or row.reason
            if row.simulated and row.runs:
                row.reason = f"{row.reason}; {SIMULATED} (as {row.device}): its result was right"
            running = None
        if running is None and todo:
            running = next(iter(todo))
        if running is not None:
            row = todo.pop(running)
            row.runs, row.broken, row.reason = False, True, f"the computation did not end well: {ending}"
    for row in rows:
        if row.runs is False:
            row.fix = f"see the whole error: python -m fusewright.cli.smoke --raise {row.name}"


def _child(names: list[str]) -> tuple[list[dict[str, Any]], str]:
    """The events of one child process, and a description of how it ended."""
    try:
        done = subprocess.run([*SMOKE, *names], capture_output=True, text=True, timeout=SMOKE_SECONDS, check=False)
        out, code = done.stdout, done.returncode
        last = done.stderr.strip().splitlines()[-1:] or [""]
        ending = f"killed by signal {-code}" if code < 0 else f"exit code {code} {last[0]}".rstrip()
    except subprocess.TimeoutExpired as e:
        out = e.stdout.decode() if isinstance(e.stdout, bytes) else e.stdout or ""
        ending = f"no answer within {SMOKE_SECONDS} s"
    return [json.loads(line) for line in out.splitlines() if line.startswith('{"name"')], ending


def machine_facts() -> dict[str, Any]:
    """Versions, CPU, threads, cache and environment, as JSON types."""
    return {
        "fusewright": __version__,
        "interface": ".".join(map(str, INTERFACE)),
        "opset": OPSET,
        "python": platform.python_version(),
        "platform": f"{sys.platform} {machine.arch()}",
        "libc": libc(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": _version("triton"),
        "native": native.absent(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "cpu": machine.cpu_name(),
        "features": sorted(machine.cpu_features()),
        "threads": torch.get_num_threads(),
        "cores": machine.cores(),
        "quota": machine.cpu_quota(),
        "cache": cache_facts(),
        "env": {n: v for n, v in sorted(os.environ.items()) if n.startswith(config.PREFIX)},
        "unknown_env": config.unknown_env(registry.environment()),
    }


def cache_facts() -> dict[str, Any]:
    """The location of the cache, its size in bytes and whether this user can write it (or could create it)."""
    found = place.existing_cache()
    try:
        folder = found.path if found else place.path()
    except RuntimeError as e:  # no home directory
        return {"path": f"nowhere: {e}", "bytes": 0, "writable": False}
    parent = next(p for p in (folder, *folder.parents) if p.exists())
    writable = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    return {"path": str(folder), "bytes": store.total_bytes(), "writable": writable}


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # some vendors ship it under another distribution name
        return "present"


PLATFORMS = {
    "win32": "Windows was never tried: models compile and run in eager, doctor and explain work; loop kernels on the host and "
    "bench need Linux. WSL 2 is Linux.",
    "darwin": "macOS was never tried on a Mac: backends that find their device run; loop kernels on the host use one "
    "thread, the processor's features are not read, bench --memory needs Linux.",
    "musl": "musl was never tried: torch has no wheels for it. Use an image with glibc (Debian, Ubuntu, Fedora).",
}
"""What works and what does not on platforms other than Linux with glibc."""


def libc() -> str:
    """The C library that this Python was built for: "musl", or "" for any other."""
    return "musl" if "musl" in str(sysconfig.get_config_var("HOST_GNU_TYPE")) else ""


def platform_remark(system: str, libc: str) -> str:
    """A remark on a platform, given by `sys.platform` and `libc`, or ""."""
    return PLATFORMS.get(libc if system.startswith("linux") else system, "")


def judge(report: Report) -> None:
    """Sort the facts into problems and remarks."""
    facts, rows = report.machine, report.rows
    if remark := platform_remark(facts["platform"].partition(" ")[0], facts["libc"]):
        report.warnings.append(remark)
    for row in rows:
        if row.clashes:
            others = ", ".join(row.clashes)
            report.problems.append(f"{row.name} is offered by {row.dist}, which is used, and by {others}")
    if not facts["cache"]["writable"]:
        report.problems.append("the cache cannot be written; set FUSEWRIGHT_CACHE_DIR")
    for name, hint in facts["unknown_env"].items():
        report.warnings.append(f"{name} is not read by anything; {hint}")
    if not any(r.chosen for r in rows):
        report.warnings.append("no backend works here: backend='fusewright' runs everything in eager")
    granted = min(facts["cores"], facts["quota"] or facts["cores"])
    if facts["threads"] > granted:
        crowd = f"{counted(facts['threads'], 'thread')} on {granted:g} granted cores"
        report.warnings.append(f"{crowd}: timings will be noisy; set OMP_NUM_THREADS")

"""The document of a run: schema, versions, machine and rows; and the comparison with an earlier one."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fusewright import machine
from fusewright.bench.device import device_name
from fusewright.errors import FusewrightError
from fusewright.interface import HOST
from fusewright.version import __version__

SCHEMA = "fusewright.bench"
SCHEMA_VERSION = 1
TOLERANCE = 0.07
"""A speed-up over eager that falls by more than this share, in runs that are not noisy, is a regression."""

Row = dict[str, Any]


class BadDocument(FusewrightError, ValueError):
    """The file is not a document of this schema version."""


def new_document(command: Sequence[str], ours: str, settings: Row) -> Row:
    """A document with no rows yet."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "versions": _versions(),
        "machine": _machine() | _accelerator(settings.get("device", HOST)),
        "backend": ours,
        "settings": settings,
        "rows": [],
    }


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "fusewright": __version__,
        "torch": torch.__version__,
    }
    for name in ("transformers", "zentorch", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> Row:
    """The CPU, and its load at the start."""
    return {
        "cpu": machine.cpu_name(),
        "arch": platform.machine(),
        "cores": machine.cores(),
        "features": sorted(machine.cpu_features()),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def _accelerator(device: str) -> Row:
    """The device, if models are not measured on the host."""
    return {} if torch.device(device).type == HOST else {"device": device_name(device)}


def environment(device: str = HOST) -> Row:
    """The time, machine and software of a measurement."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": now, "versions": _versions(), **_machine(), **_accelerator(device), "threads": torch.get_num_threads()}


def put(document: Row, row: Row) -> None:
    """Add a row, replacing one of the same model, dtype and mode."""
    key = _key(row)
    document["rows"] = [*(old for old in document["rows"] if _key(old) != key), row]


def _key(row: Row) -> tuple[str, str, str]:
    return row["model"], row["dtype"], row["mode"]


def load(path: Path) -> Row:
    """Read a document. Raises `BadDocument` for anything else."""
    try:
        document: Row = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadDocument(f"{path}: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise BadDocument(f"{path} is no {SCHEMA} document")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise BadDocument(
            f"{path} has schema version {document.get('schema_version')}, this is version {SCHEMA_VERSION}"
        )
    return document


def save(document: Row, path: Path) -> None:
    """Write the document atomically, so that an interrupted run keeps the last good one."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


def regressions(document: Row, baseline: Row) -> list[str]:
    """One line for each row whose speed-up over eager fell by more than `TOLERANCE`, or that fails now but did not then.

    Speed-ups are compared rather than times, since a baseline may come from another day or machine. Noisy rows are left out.
    """
    before = {_key(row): row for row in baseline["rows"]}
    lines = []
    for row in document["rows"]:
        old = before.get(_key(row), {}).get("contenders", {}).get(baseline["backend"], {})
        new = row["contenders"].get(document["backend"], {})
        name = f"{row['model']} {row['dtype']}"
        if old.get("status") != "ok" or not new:
            continue
        if new.get("status") != "ok":
            lines.append(f"{name}: {new.get('reason', 'failed')}; it ran in the baseline")
        elif "high" not in (row["noise"], before[_key(row)]["noise"]) and new["speedup"] < old["speedup"] * (
            1 - TOLERANCE
        ):
            lines.append(f"{name}: {new['speedup']:.2f}x over eager, {old['speedup']:.2f}x in the baseline")
    return lines


def not_compared(document: Row, baseline: Row) -> list[str]:
    """One line for each row of either document that `regressions` cannot compare, and why."""
    now, before = ({_key(row): row for row in d["rows"]} for d in (document, baseline))
    lines = [f"{' '.join(key)}: {why}" for key in now | before if (why := _incomparable(key, now, before, document, baseline))]
    names = [d["backend"] for d in (baseline, document)]
    if names[0] != names[1]:
        lines.insert(0, f"the baseline is of {names[0]}, this run of {names[1]}")
    return lines


def _incomparable(
    key: tuple[str, str, str], now: dict[Any, Row], before: dict[Any, Row], document: Row, baseline: Row
) -> str:
    """Why a row is not compared, or ""."""
    if key not in before:
        return "not in the baseline"
    if key not in now:
        return "only in the baseline"
    old = before[key]["contenders"].get(baseline["backend"], {})
    if old.get("status") != "ok":
        return f"{baseline['backend']} did not run in the baseline"
    new = now[key]["contenders"].get(document["backend"])
    if new is None:
        return f"{document['backend']} was not measured in this run"
    if new["status"] != "ok":
        return ""  # a regression
    noisy = [name for name, row in (("this run", now[key]), ("the baseline", before[key])) if row["noise"] == "high"]
    return f"noisy in {' and '.join(noisy)}" if noisy else ""

"""The result of a run of the kit, as the file written by `fusewright conformance --json`. Files of several runs merge into one
record."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fusewright.conformance.ops import entries
from fusewright.conformance.settings import Settings
from fusewright.conformance.verdicts import Check, Verdict, summary
from fusewright.interface import Unavailable

SCHEMA = 2
SEVERAL = ("C1", "C2", "C4")
"""Levels whose jobs have several checks, each named after the job with a suffix."""


@dataclass(frozen=True)
class Record:
    """The checks of one backend, and the environment of the run."""

    backend: str
    device: str
    """Type and architecture, the latter as reported by torch and the system, or the reason why the backend is not available."""
    simulated: bool
    available: bool
    torch: tuple[str, ...]
    """Releases of torch, more than one if runs were merged."""
    checks: tuple[Check, ...]
    entries: Mapping[str, int] = field(default_factory=dict)
    """Number of OpInfo entries per tested dtype, for the whole database and not a shard."""

    @classmethod
    def of(cls, settings: Settings, checks: Iterable[Check]) -> Record:
        """The record of a run in this environment."""
        device, found = settings.device(), tuple(checks)
        there = not isinstance(device, Unavailable)
        where = device.reason if isinstance(device, Unavailable) else f"{device.type} {device.arch}"
        return cls(settings.backend, where, settings.simulate, there, (_release(),), found, _entries(settings, found))

    @property
    def arch(self) -> str:
        return self.device.partition(" ")[2]

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device, "simulated": self.simulated, "available": self.available, "torch": self.torch,
            "entries": dict(self.entries),
            **summary(self.checks).as_json(), "checks": [c.as_json() for c in self.checks],
        }  # fmt: skip

    @classmethod
    def from_json(cls, backend: str, found: Mapping[str, Any]) -> Record:
        checks = tuple(map(Check.from_json, found["checks"]))
        where = found["device"], found["simulated"], found["available"]
        return cls(backend, *where, tuple(found["torch"]), checks, found.get("entries", {}))

    def with_more(self, other: Record) -> Record:
        """Merge two records: checks of `other` replace those of the same name. A job that was skipped in one, e.g. for its
        dtypes, gets its result from the other. ValueError for another device."""
        if (other.device, other.simulated) != (self.device, self.simulated):
            raise ValueError(
                f"{self.backend} was checked on {_place(self)} and on {_place(other)}: merge files of one device"
            )
        kept = (c for c in self.checks if not _done_again(c, other))
        new = (c for c in other.checks if c.verdict is not Verdict.SKIPPED or not _done_again(c, self))
        checks = {(c.level, c.name): c for c in (*kept, *new)}
        return replace(
            self, torch=tuple(sorted({*self.torch, *other.torch})), checks=tuple(checks.values()),
            entries={**self.entries, **other.entries},
        )  # fmt: skip


def _done_again(c: Check, other: Record) -> bool:
    """Whether `c` stands for a whole job that died or was skipped, and `other` has the checks of that job."""
    alone = (c.verdict.bad or c.verdict is Verdict.SKIPPED) and c.level in SEVERAL
    return alone and any(o.level == c.level and o.name.startswith(f"{c.name} ") for o in other.checks)


def write(path: Path, records: Iterable[Record]) -> None:
    path.write_text(
        json.dumps({"schema": SCHEMA, "backends": {r.backend: r.as_json() for r in records}}), encoding="utf-8"
    )


def read(path: Path) -> list[Record]:
    """The records of a file, one per backend. ValueError for a file of another version."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{path.name} was not written by this version's --json (schema {SCHEMA}); run it again")
    return [Record.from_json(name, one) for name, one in found["backends"].items()]


def merged(paths: Iterable[Path]) -> dict[str, Record]:
    """Merge the records of several files by backend; the last file's result of a check counts."""
    records: dict[str, Record] = {}
    for record in (r for path in paths for r in read(path)):
        known = records.get(record.backend)
        records[record.backend] = known.with_more(record) if known else record
    return records


def _entries(settings: Settings, checks: Iterable[Check]) -> dict[str, int]:
    """Number of entries in the whole database; none if it was not used."""
    if not any(c.name.startswith(entries.PREFIX) for c in checks):
        return {}
    return dict(Counter(name.rpartition(" ")[2] for name in entries.names(replace(settings, part=1))))


def _place(r: Record) -> str:
    return f"simulated {r.device}" if r.simulated else r.device


def _release() -> str:
    """Torch's version without the build suffix."""
    return str(torch.__version__).partition("+")[0]

"""Generate docs/results/<machine>.md from the JSON records next to it: `python -m ci.docs.tables` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ci.docs import models

Record = dict[str, Any]
Rows = Iterable[Sequence[object]]

FOLDER = Path(__file__).resolve().parents[2] / "docs/results"
NAME = re.compile(r"(?P<date>\d{4}-\d\d-\d\d)-(?P<machine>[a-z0-9]+)(?:-(?P<what>[a-z0-9-]+))?\.json")
MACHINES = {
    "x86": "2-core AMD Zen 5 virtual machine (AVX-512, VNNI, BF16), 2 threads",
    "zen3": "2-core AMD Zen 3 virtual machine (AVX2 alone), 2 threads",
    "h100": "NVIDIA H100 80 GB",
    "h100x2": "Two NVIDIA H100 80 GB; Intel Xeon with AMX, 32 cores",
    "h200": "NVIDIA H200; Intel Xeon with AMX, 16 cores",
    "h200x2": "Two NVIDIA H200; Intel Xeon with AMX, 32 cores",
    "xeon": "Intel Xeon with AMX, torch 2.11",
    "gpu": "Six GPU targets, built without a GPU",
}
INTRO = """\
# {title}

Generated from the records in this folder by `python -m ci.docs.tables`; do not edit. Newest day first.
Figures of different records are not compared: machines are shared, so read ratios.
[What they mean](../performance.md)
"""


def pages() -> dict[Path, str]:
    """Return every page with its text. Raise ValueError for a record of a machine without a title."""
    found = sorted(FOLDER.glob("*.json"), reverse=True)
    if unknown := sorted({_machine(p) for p in found} - set(MACHINES)):
        raise ValueError(f"no title in MACHINES for the records of {', '.join(unknown)}")
    all_models = models.page([(p.name, _machine(p), json.loads(p.read_text(encoding="utf-8"))) for p in found], MACHINES)
    of_machines = {FOLDER / f"{m}.md": _page(m, [p for p in found if _machine(p) == m]) for m in MACHINES}
    return {FOLDER / "models.md": all_models, **of_machines}


def newest(what: str, folder: Path = FOLDER) -> str:
    """Return the provenance of the newest record of this name and its table of times; "" if there is none."""
    named = ((m, p) for p in folder.glob("*.json") if (m := NAME.fullmatch(p.name)) and m["what"] == what)
    if not (found := sorted((m["date"], p) for m, p in named)):
        return ""
    date, path = found[-1]
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    head = f"{MACHINES[_machine(path)]}, {date} ([record](results/{path.name})):"
    return "\n\n".join([head, _steady(record["rows"], record["backend"])])


def _machine(path: Path) -> str:
    match = NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name}: expected DATE-MACHINE[-WHAT].json")
    return match["machine"]


def _page(machine: str, records: Sequence[Path]) -> str:
    return "\n".join([INTRO.format(title=MACHINES[machine]), *map(_section, records)])


def _section(path: Path) -> str:
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    name = NAME.fullmatch(path.name)
    assert name is not None
    heading = f"## {(name['what'] or 'check').replace('-', ' ')}, {name['date']}"
    tables = [table for holds, make in KINDS if holds(record) for table in make(record)]
    return "\n\n".join([heading, _facts(path, record), *filter(None, tables)]) + "\n"


def _facts(path: Path, record: Record) -> str:
    """Return the provenance of a record: file, commit, versions, device and commands."""
    versions = record.get("versions") or {k: record[k] for k in ("torch", "triton", "cuda") if k in record}
    words = [f"Record: [{path.name}]({path.name})."]
    words += [f"Commit {c}." for c in _listed(record.get("commit") or record.get("commits"))]
    words += [f"{', '.join(f'{k} {v}' for k, v in versions.items())}."] if versions else []
    words += [f"{record['device']}."] if "device" in record else []
    words += [f"Load {m['load_1min']} at the start."] if isinstance(m := record.get("machine"), dict) else []
    command = record.get("command")
    commands = [" ".join(command)] if isinstance(command, list) and command[0] == "python" else _listed(command)
    return "\n\n".join([" ".join(words), *(f"`{line}`" for c in commands for line in c.split("; "))])


def _listed(what: Any) -> list[str]:
    if isinstance(what, dict):
        return [f"{v} ({k})" for k, v in what.items()]
    return [what] if isinstance(what, str) else list(what or ())


def _table(head: Sequence[str], rows: Rows) -> str:
    """Return a table, or "" without rows."""
    lines = ["| " + " | ".join(_cell(c) for c in row) + " |" for row in rows]
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *lines]) if lines else ""


def _cell(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) and abs(value) < 100 else str(value)
    text = f"{value:.0f}" if isinstance(value, float) and abs(value) >= 100 else text
    return text.replace("|", "\\|").replace("\n", " ")


def _over(ms: float | None, base: float | None) -> str:
    return f"{base / ms:.2f}x" if ms and base else ""


# ---------------------------------------------------------------- documents of `fusewright bench`


def _bench(record: Record) -> list[str]:
    rows, ours = record["rows"], record["backend"]
    return [_steady(rows, ours), _first_calls(rows, ours), _memory(rows), _bars(record.get("bars", ()))]


def _steady(rows: Sequence[Record], ours: str) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
    head = ("model", "dtype", "mode", *(f"{n}, ms" for n in names), "over eager", "error, eager's", "noise")
    return _table(head, [_steady_row(row, names, ours) for row in rows])


def _steady_row(row: Record, names: Sequence[str], ours: str) -> list[object]:
    found = row["contenders"]
    mine = found.get(ours, {})
    error = mine.get("accuracy", {}).get("ratio_max")
    return [
        row["model"].removeprefix("kernel:"), row["dtype"], row["mode"],
        *(_median(found.get(n, {})) for n in names),
        f"{mine['speedup']:.2f}x" if "speedup" in mine else mine.get("reason", ""),
        "" if error is None else f"{error:.2f}x", row["noise"],
    ]  # fmt: skip


def _median(found: Record) -> str:
    """Format a median with three digits; "" for a contender that was not run, the status of one that failed."""
    if "steady" not in found:
        return str(found.get("status", ""))
    ms = float(found["steady"]["median_ms"])
    return f"{ms:.3g}" if ms < 100 else f"{ms:.0f}"


def _first_calls(rows: Sequence[Record], ours: str) -> str:
    made = [row for row in rows if row.get("first_call")]
    names = list(dict.fromkeys(name for row in made for name in row["first_call"]))
    cells = [[row["model"], row["dtype"], *(_cold_warm(row["first_call"].get(n, {})) for n in names)] for row in made]
    return _table(("first call, s: cold / warm", "dtype", *names), cells)


def _cold_warm(found: Record) -> str:
    return " / ".join(f"{found[k]:.2f}" for k in ("cold_s", "warm_s") if found.get(k) is not None)


def _memory(rows: Sequence[Record]) -> str:
    made = [(row, name, found) for row in rows for name, found in row.get("memory", {}).items()]
    keys = list(dict.fromkeys(k for _, _, found in made for k in found))
    return _table(("memory", "contender", *keys), [[r["model"], n, *(f.get(k, "") for k in keys)] for r, n, f in made])


def _bars(bars: Sequence[Record]) -> str:
    made = [b for b in bars if "value" in b]
    head = ("bar", "what", "measured", "first", "goal", "verdict")
    return _table(head, [[b["id"], b["what"], b["value"], b["first"], b["goal"], b["verdict"]] for b in made])


# ---------------------------------------------------------------- records of the scripts in ci/


def _gpu_check(record: Record) -> list[str]:
    return [
        _contenders(record, "inference"), _contenders(record, "training"), _decode(record["decode"]),
        _bars(record.get("bars", ())), _accuracy(record), *_flat_rows({"rows": [record.get("opinfo") or {}]}),
    ]  # fmt: skip


def _contenders(record: Record, part: str) -> str:
    rows = [(row["model"], row[part]) for row in record["table"] if part in row]
    names = list(dict.fromkeys(n for _, found in rows for n in found["ms"]))
    head = (part, *(f"{n}, ms" for n in names), "over eager", "cold first call, s")
    return _table(head, [[m, *(f["ms"].get(n, "") for n in names), *_gained(f)] for m, f in rows])


def _gained(found: Record) -> tuple[str, str]:
    ms, first = found["ms"], found.get("first_s") or {}
    return _over(ms.get("ours"), ms.get("eager")), ", ".join(f"{k} {v:.1f}" for k, v in first.items())


def _decode(found: Record) -> str:
    if not found.get("ms"):
        return ""
    alone = found.get("alone_ms", {})
    rows = [[name, ms, alone.get(name, "")] for name, ms in found["ms"].items()]
    share = f"{found['share']:.0%} of what a copy's bandwidth allows" if "share" in found else ""
    return _table((f"decoding, {share}", "ms a token", "one call on an idle GPU, ms"), rows)


def _accuracy(record: Record) -> str:
    rows = [
        [r["model"], r["dtype"], "right" if r["right"] else r["reason"], r["ratio"], "; ".join(r["replay"])]
        for r in (*record.get("accuracy", ()), *record.get("gradients", ()))
    ]
    return _table(("accuracy", "dtype", "verdict", "error, eager's", "replay"), rows)


def _flat_rows(record: Record) -> list[str]:
    """Return tables of plain values and of one level of dicts, without empty columns."""
    flat = [{k: v for k, v in _flat(row).items() if v not in ("", None)} for row in record["rows"]]
    head = list(dict.fromkeys(k for row in flat for k in row))
    return [_table([k.replace("_", " ") for k in head], [[row.get(k, "") for k in head] for row in flat])]


def _flat(row: Record) -> Record:
    inner = {f"{k}: {j}": v for k, d in row.items() if isinstance(d, dict) for j, v in d.items()}
    return {k: _words(v) for k, v in ({k: v for k, v in row.items() if not isinstance(v, dict)} | inner).items()}


def _words(value: Any) -> Any:
    return "; ".join(map(str, value)) if isinstance(value, list) else value


def _opinfo(record: Record) -> list[str]:
    runs = [*record["runs"], *record.get("products_and_attention_later", {}).get("runs", ())]
    return _flat_rows({"rows": [{k: _count(v) for k, v in run.items()} for run in runs]})


def _count(value: Any) -> Any:
    return len(value) if isinstance(value, dict | list) else value


def _right(record: Record) -> list[str]:
    cases = record["cases"]
    note = f"Cases: commit {cases['commit']}, `{cases['command']}`. Tests for the hardware: {cases['tests']}"
    wrong = [[k, _words(v)] for k, v in record["opinfo_wrong"].items()]
    rest = [[k, v] for k, v in record.items() if isinstance(v, str) and k.startswith(("x86_", "command_"))]
    return [
        note, *_flat_rows(cases), *_flat_rows({"rows": record["opinfo"]}),
        _table(("OpInfo, wrong", ""), wrong), _table(("", ""), rest),
    ]  # fmt: skip


def _listings(record: Record) -> list[str]:
    """Return the number of lines of each kind in a record of printed lines; the study holds the tables."""
    return [_table(("what", "lines"), [[k, len(v)] for k, v in record.items() if isinstance(v, list)])]


KINDS: tuple[tuple[Callable[[Record], bool], Callable[[Record], list[str]]], ...] = (
    (lambda r: r.get("schema") == "fusewright.bench", _bench),
    (lambda r: "table" in r, _gpu_check),
    (lambda r: "cases" in r, _right),
    (lambda r: "runs" in r, _opinfo),
    (lambda r: "rows" in r and "schema" not in r, _flat_rows),
    (lambda r: "units" in r, _listings),
)
"""How to recognize each kind of record, and its tables. An unrecognized record is an error (tests/unit/test_docs.py)."""

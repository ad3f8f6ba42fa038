"""Check and time `nvidia_triton` on a GPU: one command, under 8 minutes on an H100 with 16 cores. The table comes last.

    python -m ci.gpu.check [--full] [--stages accuracy,gradients,opinfo,table,decode] [--models bert,vit] [--json out.json]

First, side by side on all cores: every model of the suite in bf16 and fp32 and the suite's training steps against fp64,
a sample of torch's OpInfo database, and the first calls that are not timed: training steps, and Inductor's with
mode="reduce-overhead". Then, with nothing else running, row by row (`models.py`): first calls of inference, cold and
alone (Inductor, ours), and the times of eager, Inductor, reduce-overhead and ours, rounds interleaved. With `--full` every
first call is timed cold and alone (about 20 minutes). Compilers are in processes of their own.

Everything has a time limit; what was left out is said. The record goes to `--json`, or to gpu_check.json in the folder that
the variable OUT names. Exit code 1 when a result is wrong, something failed or was left out, or a bar was missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ci.gpu.models import MODELS
from ci.gpu.processes import Failed, Job, Worker, caches_in, end_session, side_by_side
from ci.gpu.table import decode_text, judged, table_text

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("accuracy", "gradients", "opinfo", "table", "decode")
OPINFO, OPINFO_JOBS = "1-8/16", 8
"""Which part of the OpInfo database, and in how many processes."""
ROUNDS = 5
"""Rounds of calls; the best round's median counts."""

TOGETHER, ALL, UNLIMITED = 210.0, 467.0, 1e6
"""Seconds for what runs side by side, and for everything; `--full` has no limit but that of each request."""
OPINFO_SECONDS, OPINFO_FULL, OPINFO_LATEST = 150.0, 600.0, 60.0
"""Seconds for OpInfo, and for the entries in which they end: NVRTC alone builds one for 30 s on a slow host."""
ONE_MODEL = 30.0
"""Seconds that must be left to begin with another model of the table."""
GPU_GIB = 40.0
"""For what runs side by side. The rest of 78 is for the processes of the second phase, which keep their models, and for
training steps: each holds up to 17 for a moment, and is made again when that was too much."""

COLD = {"cold_inductor": "inductor", "cold_ours": "ours"}
"""Processes of a row whose first call of inference is timed, and what they run."""
BEFOREHAND = {"inductor": (("training", "inductor"), ("inference", "reduce-overhead")), "ours": (("training", "ours"),)}
"""Processes of a row that compile side by side with all others, and what. Decoding has `DECODE` instead."""
DECODE = {"inductor": (("decode", "reduce-overhead"),), "ours": ()}
ROUNDS_OF = {
    "inference": {
        "eager": "cold_inductor", "inductor": "cold_inductor", "reduce-overhead": "inductor", "ours": "cold_ours",
    },
    "training": {"eager": "cold_inductor", "inductor": "inductor", "ours": "ours"},
}  # fmt: skip
"""Which process each contender is timed in."""

Seconds = dict[str, dict[str, float]]
"""Of first calls, by part and contender."""


class Check:
    """One run: its folder of caches and logs, what it found, and what went wrong."""

    def __init__(self, given: argparse.Namespace, folder: Path, device: Future[dict[str, Any]]) -> None:
        self.given, self.folder, self.device, self.start = given, folder, device, time.monotonic()
        self.stages = given.stages.split(",")
        self.models = given.models.split(",")
        self.record: dict[str, Any] = {"version": 3, "full": given.full, "stages": self.stages, "seconds": {}}
        self.wrong: list[str] = []
        self.ahead: dict[str, dict[str, Worker]] = {}
        """Processes of the second phase, by row."""
        self.firsts: dict[str, Seconds] = {}
        """By row."""

    def note(self, text: str) -> None:
        """Something is wrong, or was left out."""
        self.wrong.append(text)
        print(f"WRONG {text}", flush=True)

    def left(self) -> float:
        return UNLIMITED if self.given.full else ALL - (time.monotonic() - self.start)

    def main(self) -> int:
        try:
            # all load libraries and models now, beside the checks: later nothing may run beside a cold first call
            for row in [*(self.models if "table" in self.stages else []), *(["decode"] if "decode" in self.stages else [])]:
                keys = DECODE if row == "decode" else [*COLD, *BEFOREHAND]
                self.ahead[row] = {k: Worker(self.folder, f"{row}_{k}", f"{row}_{k}") for k in keys}
                self.firsts[row] = {}
            self._together()
            self.record["seconds"]["together"] = round(time.monotonic() - self.start)
            if "table" in self.stages:
                self.record["table"] = [row for m in self.models if (row := self._row(m)) is not None]
            if "decode" in self.stages:
                self.record["decode"] = self._decode()
        finally:
            for workers in self.ahead.values():
                for w in workers.values():
                    w.end()
        self.record |= self.device.result()
        self.record["seconds"]["all"] = round(time.monotonic() - self.start)
        return self._end()

    # ------------------------------------------------------------ first phase

    def _together(self) -> None:
        # the longest ones first
        jobs = [*self._opinfo(), *self._beforehand("inductor"), *self._accuracy(), *self._beforehand("ours", *COLD)]
        cores = 2.0 * len(os.sched_getaffinity(0))
        for job, result in side_by_side(jobs, UNLIMITED if self.given.full else TOGETHER, cores, GPU_GIB):
            kind, _, what = job.name.partition(":")
            if isinstance(result, Exception):
                self.note(f"{job.name}: {type(result).__name__}: {result}")
            elif kind == "opinfo":
                self._sum_up(result)
            elif kind in ("accuracy", "gradients"):
                self.record.setdefault(kind, []).extend(result)
                for row in result:
                    if not row["right"] or row["bugs"]:
                        self.note(f"{kind} of {row['model']} {row['dtype']}: {row['reason']} {row['bugs'] or ''}")
            print(f"{time.monotonic() - self.start:5.0f} s  {kind} {what} done", flush=True)

    def _beforehand(self, *keys: str) -> list[Job]:
        """Processes of the second phase load their models; those that are not timed cold compile them."""

        def job(row: str, key: str) -> Job:
            def run(seconds: float) -> None:
                until = time.monotonic() + seconds
                part = "decode" if row == "decode" else "inference"
                if key in COLD or row == "decode":
                    self.ahead[row][key].ask(until - time.monotonic(), do="ready", model=row, part=part, patient=True)
                if not self.given.full:
                    self._compile(row, key, until)

            return Job(f"beforehand:{row} {key}", run, 2.0, 1.0)

        slowest_first = ("resnet50", "t5_small", "llama")
        rows = sorted(self.ahead, key=lambda row: slowest_first.index(row) if row in slowest_first else len(slowest_first))
        return [job(row, key) for key in keys for row in rows if key in self.ahead[row]]

    def _compile(self, row: str, key: str, until: float) -> None:
        """The first calls that a process makes beforehand, or alone with `--full`."""
        for part, contender in (DECODE if row == "decode" else BEFOREHAND).get(key, ()):
            self._first(row, key, part, contender, until - time.monotonic(), patient=not self.given.full)

    def _alone(self, name: str, caches: str, seconds: float, requests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers of a process of its own."""
        worker = Worker(self.folder, name, caches, jobs=4)
        until = time.monotonic() + seconds
        try:
            return [worker.ask(until - time.monotonic(), **r) for r in requests]
        finally:
            worker.end()

    def _accuracy(self) -> list[Job]:
        jobs = []
        names = self.given.suite.split(",") if self.given.suite else _suite("SUITE")
        if "accuracy" in self.stages:
            for name in names:
                requests = [{"do": "check", "model": name, "dtype": d, "patient": True} for d in ("bf16", "fp32")]
                jobs.append((f"accuracy:{name}", requests))
        if "gradients" in self.stages:
            jobs += [(f"gradients:{n}", [{"do": "check_training", "model": n, "patient": True}]) for n in _suite("TRAINABLE")]

        def job(name: str, requests: list[dict[str, Any]]) -> Job:
            label = name.replace(":", "_")
            return Job(name, lambda seconds: self._alone(label, label, seconds, requests), 3.0, 2.0)

        return [job(*j) for j in jobs]

    def _opinfo(self) -> list[Job]:
        def run(seconds: float) -> dict[str, Any]:
            found = self.folder / "opinfo.json"
            wanted = OPINFO_FULL if self.given.full else OPINFO_SECONDS
            until = max(10.0, min(wanted, seconds - OPINFO_LATEST))
            command = [
                sys.executable, "-m", "ci.operators.opinfo", "--backend", "nvidia_triton", "--device", "cuda", "--samples", "1",
                "--shard", OPINFO, "--jobs", str(OPINFO_JOBS), "--group", "1000", "--seconds", str(until),
                "--limit", str(OPINFO_LATEST), "--json", str(found),
            ]  # fmt: skip
            with (self.folder / "opinfo.log").open("wb") as log:
                process = subprocess.Popen(
                    command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                    env={**os.environ, **caches_in(self.folder / "opinfo")},
                )  # fmt: skip
                try:
                    process.wait(timeout=until + 2 * OPINFO_LATEST)
                finally:
                    end_session(process)
            results: dict[str, Any] = json.loads(found.read_text())
            return results

        return [Job(f"opinfo:{OPINFO}", run, 1.2 * OPINFO_JOBS, 1.5 * OPINFO_JOBS)] if "opinfo" in self.stages else []

    def _sum_up(self, opinfo: Mapping[str, Any]) -> None:
        results = opinfo["results"]
        wrong = [f"{r['entry']} {r['dtype']}: {'; '.join(r['problems'][:2])}" for r in results if r["problems"]]
        shared = sum(1 for r in results if r["shared"] and not r["problems"])
        found = self.record["opinfo"] = {
            "entries": len(results), "right": len(results) - len(wrong) - shared, "wrong_in_aot_eager_too": shared,
            "wrong": wrong, "left_out": opinfo["left_out"],
            "lowered": sum(r["lowered"] for r in results), "ops": sum(r["lowered"] + r["eager"] for r in results),
        }  # fmt: skip
        for w in wrong:
            self.note(f"opinfo: {w}")
        if found["left_out"]:
            self.note(f"opinfo: {found['left_out']} entries were left out for want of time")

    # ------------------------------------------------------------ second phase

    def _row(self, model: str) -> dict[str, Any] | None:
        """Times of one model."""
        if self.left() < ONE_MODEL:
            self.note(f"{model}: left out for want of time")
            return None
        start, workers, first = time.monotonic(), self.ahead[model], self.firsts[model]
        row: dict[str, Any] = {"model": model}
        try:
            for key, contender in COLD.items():
                self._first(model, key, "inference", contender)
            if self.given.full:
                for key in BEFOREHAND:
                    self._compile(model, key, start + 600)
            between = time.monotonic()
            for part, contenders in ROUNDS_OF.items():
                there = {c: workers[w] for c, w in contenders.items() if c == "eager" or c in first.get(part, {})}
                cold = there if self.given.full else COLD.values() if part == "inference" else ()
                alone = {c: first[part][c] for c in cold if c in first.get(part, {})}
                row[part] = {"ms": self._rounds(model, part, there), "first_s": alone}
            row["seconds"] = {"first": round(between - start), "rounds": round(time.monotonic() - between)}
        finally:
            for w in self.ahead.pop(model).values():
                w.end()
        print(f"{time.monotonic() - self.start:5.0f} s  {json.dumps(row)}", flush=True)
        return row

    def _first(self, row: str, key: str, part: str, contender: str, limit: float = 120, patient: bool = False) -> None:
        request = {"do": "first", "model": row, "part": part, "contender": contender, "patient": patient}
        try:
            answer = self.ahead[row][key].ask(limit, **request)
            self.firsts[row].setdefault(part, {})[contender] = answer["seconds"]
        except Failed as e:
            self.note(f"{row}, {part}, {contender}: {e}")

    def _rounds(self, model: str, part: str, contenders: Mapping[str, Worker]) -> dict[str, float]:
        """Contenders take turns."""
        rounds: dict[str, list[float]] = {c: [] for c in contenders}
        for _ in range(ROUNDS):
            for c, worker in contenders.items():
                try:
                    rounds[c].append(worker.ask(60, do="round", model=model, part=part, contender=c)["ms"])
                except Failed as e:
                    self.note(f"{model}, {part}, {c}: {e}")
        return {c: min(ms) for c, ms in rounds.items() if ms}

    def _decode(self) -> dict[str, Any]:
        """Milliseconds a token when tokens follow each other, and of one step alone; the share of the floor: bytes of
        weights and cache over the bandwidth of a copy; and whether the tokens are eager's."""
        if self.left() < 20:
            self.note("decode: left out for want of time")
            return {}
        workers, first = self.ahead["decode"], self.firsts["decode"]
        if self.given.full:
            self._compile("decode", "inductor", time.monotonic() + 120)
        self._first("decode", "ours", "decode", "ours")
        of = {"eager": "inductor", "reduce-overhead": "inductor", "ours": "ours"}
        there = {c: workers[w] for c, w in of.items() if c == "eager" or c in first.get("decode", {})}
        found: dict[str, Any] = {"ms": self._rounds("decode", "decode", there), "first_s": first["decode"]}
        try:
            found["alone_ms"] = {c: w.ask(60, do="decode_alone", contender=c)["ms"] for c, w in there.items() if c in found["ms"]}
            agreed = found["agreed"] = workers["ours"].ask(60, do="decode_agrees")
            if agreed["wrong"]:
                self.note(f"decode: {agreed['wrong']} of {agreed['tokens']} tokens are not eager's")
            found |= workers["ours"].ask(60, do="bandwidth")
            found["floor_ms"] = found["bytes"] / found["copy_gb_s"] / 1e6
            found["share"] = found["floor_ms"] / found["ms"]["ours"]
        except (Failed, KeyError) as e:
            self.note(f"decode: {type(e).__name__}: {e}")
        return found

    # ------------------------------------------------------------ the end

    def _end(self) -> int:
        r = self.record
        bars = r["bars"] = judged(r.get("table", []), r.get("decode", {}), self.given.full)
        self.wrong += [f"bar {b['id']}: {b['value']:.2f} of {b['first']}" for b in bars if b["verdict"] == "MISS"]
        r["wrong"] = self.wrong
        print(f"\n{r.get('device', '')} {r['seconds']['all']} s, of which {r['seconds']['together']} s side by side")
        for key in ("accuracy", "gradients"):
            if key in r:
                replayed = sum(all(t.startswith("replayed") for t in row["replay"]) for row in r[key])
                print(f"{key}: {sum(row['right'] for row in r[key])} of {len(r[key])} right, {replayed} of them replayed")
        if "opinfo" in r:
            o = r["opinfo"]
            print(
                f"opinfo: {o['entries']} entries, {o['right']} right, {o['wrong_in_aot_eager_too']} wrong in aot_eager too, "
                f"{len(o['wrong'])} wrong, {o['left_out']} left out; {o['lowered']} of {o['ops']} ops lowered"
            )
        if r.get("decode"):
            print(decode_text(r["decode"]))
        for w in self.wrong:
            print(f"WRONG {w}")
        if r.get("table"):
            print(table_text(r["table"], bars, self.given.full))
        return 1 if self.wrong else 0


def _suite(names: str) -> Sequence[str]:
    from fusewright.bench import suite

    found: Sequence[str] = getattr(suite, names)
    return found


def _device() -> dict[str, Any]:
    """Asked in a process of its own: this one holds no GPU."""
    text = (
        "import torch, triton, transformers, json; print(json.dumps({'torch': torch.__version__, "
        "'triton': triton.__version__, 'transformers': transformers.__version__, 'cuda': torch.version.cuda, "
        "'device': torch.cuda.get_device_name()}))"
    )
    found: dict[str, Any] = json.loads(subprocess.check_output([sys.executable, "-c", text], text=True))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every first call cold and alone; no limit of time")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated")
    parser.add_argument("--models", default=",".join(MODELS), help="rows of the table")
    parser.add_argument("--suite", default="", help="models of the suite for 'accuracy'; default: all")
    parser.add_argument("--json", type=Path, default=None, help="where the record goes; default: $OUT/gpu_check.json")
    given = parser.parse_args(argv)
    for kind, text, known in (("stage", given.stages, STAGES), ("model", given.models, tuple(MODELS))):
        for name in text.split(","):
            if name not in known:
                parser.error(f"there is no {kind} {name!r}; there are {', '.join(known)}")
    # workers that are killed leave semaphores (tqdm's), which multiprocessing removes, and says so behind the table
    os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker:UserWarning")
    target = given.json or (Path(os.environ["OUT"]) / "gpu_check.json" if os.environ.get("OUT") else None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(1) as beside:
        device = beside.submit(_device)
        check = Check(given, Path(folder), device)
        check.record["date"] = datetime.now(UTC).date().isoformat()
        check.record["command"] = ["python", "-m", "ci.gpu.check", *(sys.argv[1:] if argv is None else argv)]
        code = check.main()
        if target is not None:
            target.write_text(json.dumps(check.record, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())

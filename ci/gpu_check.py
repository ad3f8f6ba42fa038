"""Check and time `nvidia_triton` on a GPU: one command, under 8 minutes on an H100 with 16 cores. The table comes last.

    python ci/gpu_check.py [--full] [--stages accuracy,gradients,opinfo,table,decode] [--models bert,vit] [--json out.json]

First, side by side on all cores: every model of the suite in bf16 and fp32 and the suite's training steps against fp64,
a sample of torch's OpInfo database, and what is not timed cold into the compilers' caches on disk: training steps and
Inductor's reduce-overhead graphs. Then, with nothing else running, the times (`gpu_models.py`): eager, Inductor, Inductor
with mode="reduce-overhead" and ours, each compiler in a process of its own, rounds interleaved. First calls of inference
are cold and alone (Inductor, ours); the others are warm (they find their graphs on disk) and run beside each other. With
`--full` nothing is compiled beforehand and every first call is cold and alone (about 15 minutes).

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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from gpu_models import MODELS  # type: ignore[import-not-found]
from gpu_processes import Failed, Job, Worker, caches_in, end_session, side_by_side  # type: ignore[import-not-found]
from gpu_table import decode_text, judged, table_text  # type: ignore[import-not-found]

HERE = Path(__file__).resolve().parent
STAGES = ("accuracy", "gradients", "opinfo", "table", "decode")
OPINFO, OPINFO_JOBS = "1-8/16", 8
"""Which part of the OpInfo database, and in how many processes."""
ROUNDS = 5
"""Rounds of calls; the best round's median counts."""

TOGETHER, ALL, UNLIMITED = 190.0, 467.0, 1e6
"""Seconds for what runs side by side, and for everything; `--full` has no limit but that of each request."""
OPINFO_SECONDS, OPINFO_FULL, OPINFO_LATEST = 120.0, 600.0, 60.0
"""Seconds for OpInfo, and for the entries in which they end: NVRTC alone builds one for 30 s on a slow host."""
ONE_MODEL = 30.0
"""Seconds that must be left to begin with another model of the table."""
GPU_GIB = 62.0
"""For what runs side by side; the processes of the second phase have their contexts meanwhile."""
GIB = {"bert": 10.0, "vit": 9.0, "distilgpt2": 11.0, "t5_small": 8.0, "resnet50": 17.0, "llama": 13.0}
"""Of Inductor's training steps."""


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

    def note(self, text: str) -> None:
        """Something is wrong, or was left out."""
        self.wrong.append(text)
        print(f"WRONG {text}", flush=True)

    def left(self) -> float:
        return UNLIMITED if self.given.full else ALL - (time.monotonic() - self.start)

    def main(self) -> int:
        try:
            # all import and load libraries now, beside the checks: later nothing may run beside a cold first call
            for m in [*(self.models if "table" in self.stages else []), *(["decode"] if "decode" in self.stages else [])]:
                self._start(m)
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
        jobs = [*self._opinfo(), *self._precompiling(), *self._accuracy()]
        cores = 1.5 * len(os.sched_getaffinity(0))
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

    def _precompiling(self) -> list[Job]:
        """What is not to be timed cold."""
        if self.given.full:
            return []
        table = {m: {"training": ("inductor", "ours"), "inference": ("reduce-overhead",)} for m in self.models}
        parts: dict[str, dict[str, tuple[str, ...]]] = table if "table" in self.stages else {}
        if "decode" in self.stages:
            parts["decode"] = {"decode": ("reduce-overhead",)}

        def job(model: str) -> Job:
            def run(seconds: float) -> None:
                for part, contenders in parts[model].items():
                    self._alone(f"warm_{model}_{part}", f"warm_{model}", seconds, [
                        {"do": "first", "model": model, "part": part, "contender": c} for c in contenders
                    ])  # fmt: skip

            return Job(f"precompiling:{model}", run, GIB.get(model, 5.0), 2.0)

        slowest_first = ("resnet50", "t5_small", "llama", "bert", "vit")
        order = sorted(parts, key=lambda m: slowest_first.index(m) if m in slowest_first else len(slowest_first))
        return [job(m) for m in order]

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
                requests = [{"do": "check", "model": name, "dtype": d} for d in ("bf16", "fp32")]
                jobs.append((f"accuracy:{name}", requests))
        if "gradients" in self.stages:
            jobs += [(f"gradients:{n}", [{"do": "check_training", "model": n}]) for n in _suite("TRAINABLE")]

        def job(name: str, requests: list[dict[str, Any]]) -> Job:
            label = name.replace(":", "_")
            return Job(name, lambda seconds: self._alone(label, label, seconds, requests), 3.5)

        return [job(*j) for j in jobs]

    def _opinfo(self) -> list[Job]:
        def run(seconds: float) -> dict[str, Any]:
            found = self.folder / "opinfo.json"
            wanted = OPINFO_FULL if self.given.full else OPINFO_SECONDS
            until = max(10.0, min(wanted, seconds - OPINFO_LATEST))
            command = [
                sys.executable, str(HERE / "opinfo.py"), "--backend", "nvidia_triton", "--device", "cuda", "--samples",
                "1", "--shard", OPINFO, "--jobs", str(OPINFO_JOBS), "--group", "1000", "--seconds", str(until),
                "--limit", str(OPINFO_LATEST), "--json", str(found),
            ]  # fmt: skip
            with (self.folder / "opinfo.log").open("wb") as log:
                process = subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **caches_in(self.folder / "opinfo")},
                    start_new_session=True,
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
            print(f"opinfo: {found['left_out']} entries were left out for want of time", flush=True)

    # ------------------------------------------------------------ second phase

    def _start(self, model: str) -> None:
        """The processes of a row; they import, load libraries and wait."""
        warm = f"cold_{model}_warm" if self.given.full else f"warm_{model}"
        caches = {"cold": f"cold_{model}", "warm": warm, "ours": f"ours_{model}"}
        if model == "decode":
            del caches["cold"]
        self.ahead[model] = {k: Worker(self.folder, f"{model}_{k}", c) for k, c in caches.items()}

    def _row(self, model: str) -> dict[str, Any] | None:
        """Times of one model."""
        if self.left() < ONE_MODEL:
            self.note(f"{model}: left out for want of time")
            return None
        workers = self.ahead[model]
        row: dict[str, Any] = {"model": model, "inference": {}, "training": {}}
        try:
            first: dict[str, dict[str, float]] = {"inference": {}, "training": {}}
            self._first(workers["cold"], model, "inference", "inductor", first)
            self._first(workers["ours"], model, "inference", "ours", first)
            self._others(model, first)
            row |= {part: {"ms": {}, "first_s": found} for part, found in first.items()}
            by = {
                "inference": {
                    "eager": "cold", "inductor": "cold", "reduce-overhead": "warm", "ours": "ours",
                },
                "training": {"eager": "cold", "inductor": "warm", "ours": "ours"},
            }  # fmt: skip
            for part, contenders in by.items():
                there = {c: workers[w] for c, w in contenders.items() if c == "eager" or c in first[part]}
                row[part]["ms"] = self._rounds(model, part, there)
        finally:
            for w in self.ahead.pop(model).values():
                w.end()
        print(f"{time.monotonic() - self.start:5.0f} s  {json.dumps(row)}", flush=True)
        return row

    def _others(self, model: str, first: dict[str, dict[str, float]]) -> None:
        """First calls that are not timed cold and alone, side by side, while the next row gets ready. With `--full` they
        are, one after the other."""
        workers, later = self.ahead[model], list(self.ahead)[1:2]

        def mine() -> None:
            warm = {} if self.given.full else {"caches": caches_in(self.folder / f"warm_{model}")}
            self._first(workers["ours"], model, "training", "ours", first, **warm)

        def inductors() -> None:
            self._first(workers["warm"], model, "training", "inductor", first)
            self._first(workers["warm"], model, "inference", "reduce-overhead", first)

        def ready(worker: Worker, row: str, part: str) -> None:
            try:
                worker.ask(120, do="ready", model=row, part=part)
            except Failed as e:
                self.note(f"{row}, {part}: {e}")

        todo: list[Callable[[], None]] = [mine, inductors, partial(ready, workers["cold"], model, "training")]
        for row in later:
            part = "decode" if row == "decode" else "inference"
            todo += [partial(ready, self.ahead[row][k], row, part) for k in ("cold", "ours") if k in self.ahead[row]]
        threads = [threading.Thread(target=t) for t in todo]
        for t in threads:
            t.start()
            if self.given.full:
                t.join()
        for t in threads:
            t.join()

    def _first(
        self, worker: Worker, model: str, part: str, contender: str, into: dict[str, dict[str, float]], **more: Any
    ) -> None:
        try:
            answer = worker.ask(120, do="first", model=model, part=part, contender=contender, **more)
            into[part][contender] = answer["seconds"]
        except Failed as e:
            self.note(f"{model}, {part}, {contender}: {e}")

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
        workers = self.ahead["decode"]
        first: dict[str, dict[str, float]] = {"decode": {}}
        self._first(workers["ours"], "decode", "decode", "ours", first)
        self._first(workers["warm"], "decode", "decode", "reduce-overhead", first)
        there = {c: workers[w] for c, w in {"eager": "warm", "reduce-overhead": "warm", "ours": "ours"}.items()}
        found: dict[str, Any] = {"first_s": first["decode"], "ms": self._rounds("decode", "decode", there)}
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
        "import torch, triton, json; print(json.dumps({'torch': torch.__version__, 'triton': triton.__version__, "
        "'cuda': torch.version.cuda, 'device': torch.cuda.get_device_name()}))"
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
    target = given.json or (Path(os.environ["OUT"]) / "gpu_check.json" if os.environ.get("OUT") else None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ThreadPoolExecutor(1) as beside:
        device = beside.submit(_device)
        check = Check(given, Path(folder), device)
        code = check.main()
        if target is not None:
            target.write_text(json.dumps(check.record, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())

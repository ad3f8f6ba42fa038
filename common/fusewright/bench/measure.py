"""One row of a run: steady state, then first calls and memory in new processes."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusewright.bench.contenders import EAGER, KNOWN, Contender, Unavailable
from fusewright.bench.steady import Progress, Row, Settings, steady
from fusewright.bench.turns import TURNS
from fusewright.bench.worker import WorkerError

REPEAT_BELOW = 8.0  # shorter first calls are measured twice: C6 compares differences of them
# Return freed memory to the system at once, so that resident memory shows what is in use.
MALLOC_ENV = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "0",
}


def measure(model: str, dtype: str, contenders: Sequence[Contender], settings: Settings, progress: Progress) -> Row:
    """Measure one row: every contender's steady state, accuracy and (if requested) first calls and memory.

    A contender that fails has `status` "failed" or "unavailable" and a `reason`; the others are measured. Raises
    `fusewright.bench.steady.ModelFailed`.
    """
    missing = {c.name: why for c in contenders if (why := _missing(c, settings)) is not None}
    runnable = [c for c in contenders if c.name not in missing]
    load = {
        "model": model,
        "dtype": dtype,
        "size": settings.size,
        "train": settings.train,
        "threads": settings.threads,
        "device": settings.device,
    }
    with contextlib.ExitStack() as stack:
        caches = {c.name: _caches(stack, settings) for c in runnable}
        found = steady(load, runnable, settings, progress, caches)
        entries = missing | found.pop("contenders")
        row: Row = {"model": model, "dtype": dtype, "mode": "train" if settings.train else "inference"}
        row |= found | {"contenders": {c.name: entries[c.name] for c in contenders}}
        alive = [c for c in runnable if entries[c.name]["status"] == "ok"]
        if settings.first_call and not settings.train and not settings.thorough:
            row["first_call"] = {
                c.name: _again(load, c, settings, progress, caches[c.name], entries[c.name]["compile_s"]) for c in alive
            }
    if settings.first_call and not settings.train and settings.thorough:
        # The time of Dynamo and AOTAutograd alone; a backend's own share is what exceeds it.
        base = [KNOWN[name] for name in ("dynamo-eager", "aot_eager") if name not in entries]
        row["first_call"] = {c.name: first_call(load, c, settings, progress) for c in (*alive, *base)}
    if settings.memory and not settings.train:
        row["memory"] = {c.name: memory(load, c, settings, progress) for c in alive}
    return row


def _missing(contender: Contender, settings: Settings) -> Row | None:
    try:
        contender.check_available()
    except Unavailable as error:
        return {"status": "unavailable", "reason": str(error)}
    if settings.train and not contender.trains:
        return {"status": "unavailable", "reason": "for inference only"}
    return None


def first_call(load: Row, contender: Contender, settings: Settings, progress: Progress) -> Row:
    """Seconds of the first call: `cold_s` with empty caches, `warm_s` in a second process with the same caches.

    Both are medians of `taken_s`; `reason` instead if a process failed.
    """
    taken: dict[str, list[float]] = {"cold": [], "warm": []}
    repeats = 1
    while len(taken["cold"]) < repeats:
        with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as cache:
            for kind, times in taken.items():
                if kind == "warm" and contender is EAGER:
                    continue  # eager caches nothing on disk
                progress(f"{kind} first call of {contender.name}")
                try:
                    times.append(_fresh(load, contender, settings, _cache_env(cache), "first")["seconds"])
                except WorkerError as error:
                    return {"reason": str(error)}
        if max(taken["cold"]) < REPEAT_BELOW:
            repeats = 2
    medians = {f"{kind}_s": statistics.median(times) for kind, times in taken.items() if times}
    return medians | {"taken_s": taken}


def _caches(stack: contextlib.ExitStack, settings: Settings) -> Mapping[str, str]:
    """Use new caches for our plans and measured choices, so that figures never come from an older build. Others' caches are
    emptied too if the steady process times the cold first call."""
    found = _cache_env(stack.enter_context(tempfile.TemporaryDirectory(prefix="fusewright-bench-")))
    return {"FUSEWRIGHT_CACHE_DIR": found["FUSEWRIGHT_CACHE_DIR"]} if settings.thorough or not settings.first_call else found


def _again(
    load: Row, contender: Contender, settings: Settings, progress: Progress, caches: Mapping[str, str], cold: float
) -> Row:
    """`first_call` in half the time: the cold call is that of the steady process, the warm one is measured once."""
    taken: dict[str, list[float]] = {"cold": [cold], "warm": []}
    if contender is not EAGER:
        progress(f"warm first call of {contender.name}")
        try:
            taken["warm"].append(_fresh(load, contender, settings, caches, "first")["seconds"])
        except WorkerError as error:
            return {"reason": str(error)}
    return {f"{kind}_s": times[0] for kind, times in taken.items() if times} | {"taken_s": taken}


def _cache_env(folder: str) -> dict[str, str]:
    names = ("TORCHINDUCTOR_CACHE_DIR", "FUSEWRIGHT_CACHE_DIR", "TRITON_CACHE_DIR")
    return {name: str(Path(folder) / name.lower()) for name in names}


def memory(load: Row, contender: Contender, settings: Settings, progress: Progress) -> Row:
    """Bytes of steady calls: `call_peak` above the resident size between them, `total_peak` of the process.

    Weights packed twice and retained arenas show only in the second.
    """
    progress(f"memory of {contender.name}")
    with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as cache:
        env = {**_cache_env(cache), **MALLOC_ENV}
        try:
            answer = _fresh(load, contender, settings, env, "memory", calls=3)
        except WorkerError as error:
            return {"reason": str(error)}
    return {"call_peak": answer["peak"] - answer["resident"], "total_peak": answer["peak"]}


def _fresh(load: Row, contender: Contender, settings: Settings, env: Mapping[str, str], do: str, **fields: Any) -> Row:
    """Send one request to a new process that has built the model (and made its first call, unless that is the request)."""
    with TURNS.worker({**contender.env, **env}, settings.threads) as worker:
        worker.ask("load", settings.timeout, **load)
        if do != "first":
            worker.ask("first", settings.timeout, contender=contender.name)
        return worker.ask(do, settings.timeout, contender=contender.name, **fields)

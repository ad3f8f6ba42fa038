"""What is measured, in which order: steady state interleaved, first calls and memory in fresh processes."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusewright.bench.contenders import EAGER, KNOWN, Contender, Unavailable
from fusewright.bench.stats import noise_verdict, paired_ratio, summarize
from fusewright.bench.worker import Worker, WorkerError

Progress = Callable[[str], None]
Row = dict[str, Any]

BLOCK_SECONDS = 0.03  # short calls are repeated until a round's block lasts about this long
MAX_CALLS = 50
DISCARD_BELOW = (
    0.02  # a short call after another contender's starts with cold caches: the first one is not timed
)
FIRST_REPEAT_BELOW = 8.0  # first calls faster than this are taken twice: their differences matter (C6)
# Freed memory goes back to the system at once, so that resident memory says what is in use.
MALLOC_ENV = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}


@dataclass(frozen=True)
class Settings:
    """How long and how much. `seconds` bounds the interleaved rounds of one model, `timeout` one request to a
    process.
    """

    size: str = "full"
    train: bool = False
    threads: int = 1
    seconds: float = 10.0
    warm_seconds: float = 2.0
    timeout: float = 300.0
    min_rounds: int = 5
    max_rounds: int = 25
    first_call: bool = False
    memory: bool = False
    accuracy: bool = True


class ModelFailed(RuntimeError):
    """The model itself could not be built or run in eager mode: there is nothing to compare with."""


class _Lost(Exception):
    """A process ended or hung while it ran this contender."""

    def __init__(self, contender: str, reason: str) -> None:
        super().__init__(reason)
        self.contender = contender
        self.reason = reason


def measure(
    model: str, dtype: str, contenders: Sequence[Contender], settings: Settings, progress: Progress
) -> Row:
    """One row: every contender's steady state, accuracy and (where asked) first calls and memory.

    A contender that fails has `status` "failed" or "unavailable" and a `reason`; the rest are measured.
    Raises `ModelFailed`.
    """
    found: dict[str, Row] = {}
    runnable: list[Contender] = []
    for contender in contenders:
        try:
            contender.check_available()
        except Unavailable as error:
            found[contender.name] = {"status": "unavailable", "reason": str(error)}
            continue
        if settings.train and not contender.trains:
            found[contender.name] = {"status": "unavailable", "reason": "for inference only"}
            continue
        runnable.append(contender)
    load = {
        "model": model,
        "dtype": dtype,
        "size": settings.size,
        "train": settings.train,
        "threads": settings.threads,
    }
    steady = _steady(load, runnable, settings, found, progress)
    results = {contender.name: found[contender.name] for contender in contenders}
    row: Row = {"model": model, "dtype": dtype, "mode": "train" if settings.train else "inference"}
    row |= {"contenders": results, **steady}
    alive = [c for c in runnable if results[c.name]["status"] == "ok"]
    if settings.first_call and not settings.train:
        extra = [KNOWN[name] for name in ("dynamo-eager", "aot_eager") if name not in results]
        row["first_call"] = _first_calls(load, [*alive, *extra], settings, progress)
    if settings.memory and not settings.train:
        row["memory"] = _memory(load, alive, settings, progress)
    return row


# -- steady state ----------------------------------------------------------------------------------


def _steady(
    load: Row,
    contenders: Sequence[Contender],
    settings: Settings,
    results: dict[str, Row],
    progress: Progress,
) -> Row:
    """Fills `results`; starts over without a contender that took its process down."""
    lost: dict[str, Row] = {}
    while True:
        attempt: dict[str, Row] = dict(lost)
        try:
            extra = _steady_once(
                load, [c for c in contenders if c.name not in lost], settings, attempt, progress
            )
        except _Lost as error:
            if error.contender == EAGER.name:
                raise ModelFailed(f"eager: {error.reason}") from error
            lost[error.contender] = {"status": "failed", "reason": error.reason}
            continue
        results.update({c.name: attempt[c.name] for c in contenders})
        return extra


@dataclass
class _Lane:
    """A contender in its process, and what its rounds gave. `label` tells an isolated contender's own eager
    apart.
    """

    label: str
    contender: Contender
    worker: Worker
    calls: int
    discard: int
    compile_s: float
    notes: list[str]
    blocks: list[list[float]]


def _steady_once(
    load: Row,
    contenders: Sequence[Contender],
    settings: Settings,
    results: dict[str, Row],
    progress: Progress,
) -> Row:
    with contextlib.ExitStack() as stack:
        lanes: list[_Lane] = []
        extra: Row = {}
        shared = [c for c in contenders if not c.isolated]
        for group in [shared, *([EAGER, c] for c in contenders if c.isolated)]:
            worker = stack.enter_context(
                _fresh_worker(stack, group[-1].env if group is not shared else {}, settings)
            )
            try:
                extra = {**worker.ask("load", settings.timeout, **load)["extra"], **extra}
            except WorkerError as error:
                raise ModelFailed(str(error)) from error
            for contender in group:
                label = (
                    contender.name
                    if group is shared or contender is not EAGER
                    else f"eager beside {group[-1].name}"
                )
                lane = _prepare(label, contender, worker, settings, results, progress)
                if lane is not None:
                    lanes.append(lane)
        progress(f"timing {len(lanes)} contenders")
        _rounds(lanes, settings)
        return {"extra": extra, **_collect(lanes, settings, results, progress)}


def _fresh_worker(stack: contextlib.ExitStack, env: Mapping[str, str], settings: Settings) -> Worker:
    # Our plans and measured choices are made anew, so that figures never come from an older build's cache.
    cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="fusewright-bench-"))
    return Worker({"FUSEWRIGHT_CACHE_DIR": cache, **env}, settings.threads)


def _prepare(
    label: str,
    contender: Contender,
    worker: Worker,
    settings: Settings,
    results: dict[str, Row],
    progress: Progress,
) -> _Lane | None:
    progress(f"compiling for {contender.name}" if contender is not EAGER else "running eager")
    try:
        first = worker.ask("first", settings.timeout, contender=contender.name)
        call_s = worker.ask(
            "warm_up", settings.timeout, contender=contender.name, seconds=settings.warm_seconds
        )["call_s"]
    except WorkerError as error:
        if error.fatal:
            raise _Lost(contender.name, str(error)) from error
        if contender is EAGER:
            raise ModelFailed(f"eager: {error}") from error
        results[contender.name] = {"status": "failed", "reason": str(error)}
        return None
    calls = min(MAX_CALLS, max(1, round(BLOCK_SECONDS / max(call_s, 1e-7))))
    return _Lane(
        label, contender, worker, calls, int(call_s < DISCARD_BELOW), first["seconds"], first["notes"], []
    )


def _rounds(lanes: Sequence[_Lane], settings: Settings) -> None:
    """Each round runs every lane once, starting one further each time; rounds fill the time budget, within
    their bounds.
    """
    spent, rounds = 0.0, 0
    while rounds < settings.min_rounds or (
        rounds < settings.max_rounds and spent * (1 + 1 / rounds) < settings.seconds
    ):
        start = rounds % len(lanes)
        for lane in (*lanes[start:], *lanes[:start]):
            try:
                answer = lane.worker.ask(
                    "block",
                    settings.timeout,
                    contender=lane.contender.name,
                    calls=lane.calls,
                    discard=lane.discard,
                )
            except WorkerError as error:
                raise _Lost(lane.contender.name, str(error)) from error
            lane.blocks.append(answer["times"])
            spent += sum(answer["times"]) * (1 + lane.discard / lane.calls)
        rounds += 1


def _collect(lanes: Sequence[_Lane], settings: Settings, results: dict[str, Row], progress: Progress) -> Row:
    summaries = {lane.label: summarize(lane.blocks) for lane in lanes}
    for lane in lanes:
        if lane.label != lane.contender.name:
            continue
        beside = f"eager beside {lane.label}"
        base = summaries[beside if beside in summaries else EAGER.name]
        entry: Row = {
            "status": "ok",
            "steady": summaries[lane.label].as_json(),
            "speedup": paired_ratio(base.rounds_ms, summaries[lane.label].rounds_ms),
            "compile_s": lane.compile_s,
        }
        if beside in summaries:
            entry["own_eager"] = base.as_json()
        if lane.notes:
            entry["notes"] = lane.notes
        if settings.accuracy and lane.contender.backend is not None:
            progress(f"checking {lane.label} against fp64")
            entry["accuracy"] = _accuracy(lane, settings)
        results[lane.label] = entry
    return {"noise": noise_verdict([summary.cv for summary in summaries.values()])}


def _accuracy(lane: _Lane, settings: Settings) -> Row:
    try:
        return lane.worker.ask("accuracy", settings.timeout, contender=lane.contender.name)
    except WorkerError as error:
        if error.fatal:
            raise _Lost(lane.contender.name, str(error)) from error
        return {"passed": False, "reason": f"not compared: {error}"}


# -- fresh processes -------------------------------------------------------------------------------


def _first_calls(
    load: Row, contenders: Sequence[Contender], settings: Settings, progress: Progress
) -> dict[str, Row]:
    """Seconds of the first call: `cold` with empty caches, `warm` in a second process on the caches that the
    first one left.
    """
    return {contender.name: _first_call(load, contender, settings, progress) for contender in contenders}


def _first_call(load: Row, contender: Contender, settings: Settings, progress: Progress) -> Row:
    taken: dict[str, list[float]] = {"cold": [], "warm": []}
    repeats = 1
    while len(taken["cold"]) < repeats:
        with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as cache:
            for kind, times in taken.items():
                if kind == "warm" and contender is EAGER:
                    continue  # eager keeps nothing on disk
                progress(f"{kind} first call of {contender.name}")
                try:
                    times.append(_fresh(load, contender, settings, _cache_env(cache), "first")["seconds"])
                except WorkerError as error:
                    return {"reason": str(error)}
        if max(taken["cold"]) < FIRST_REPEAT_BELOW:
            repeats = 2
    return {f"{kind}_s": statistics.median(times) for kind, times in taken.items() if times} | {
        "taken_s": taken
    }


def _cache_env(folder: str) -> dict[str, str]:
    names = {
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "FUSEWRIGHT_CACHE_DIR": "fusewright",
        "TRITON_CACHE_DIR": "triton",
    }
    return {name: str(Path(folder) / sub) for name, sub in names.items()}


def _fresh(
    load: Row, contender: Contender, settings: Settings, env: Mapping[str, str], do: str, **fields: Any
) -> Row:
    """One request in a new process in which the model was just built, and the first call made if `do` is
    another one.
    """
    with Worker({**contender.env, **env}, settings.threads) as worker:
        worker.ask("load", settings.timeout, **load)
        if do != "first":
            worker.ask("first", settings.timeout, contender=contender.name)
        return worker.ask(do, settings.timeout, contender=contender.name, **fields)


def _memory(
    load: Row, contenders: Sequence[Contender], settings: Settings, progress: Progress
) -> dict[str, Row]:
    """Bytes: `call_peak` (above what is resident between calls) and `total_peak` (the whole process, in
    steady calls).
    """
    measured: dict[str, Row] = {}
    for contender in contenders:
        progress(f"memory of {contender.name}")
        with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as cache:
            try:
                answer = _fresh(
                    load,
                    contender,
                    settings,
                    {"FUSEWRIGHT_CACHE_DIR": cache, **MALLOC_ENV},
                    "memory",
                    calls=3,
                )
            except WorkerError as error:
                measured[contender.name] = {"reason": str(error)}
                continue
        measured[contender.name] = {
            "call_peak": answer["peak"] - answer["resident"],
            "total_peak": answer["peak"],
        }
    return measured

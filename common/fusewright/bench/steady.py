"""Steady state: contenders alternate in rounds, each in a long-lived process."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fusewright.bench.contenders import EAGER, Contender
from fusewright.bench.load import OthersMeter
from fusewright.bench.stats import noise_verdict, paired_ratio, summarize
from fusewright.bench.turns import TURNS
from fusewright.bench.worker import Worker, WorkerError
from fusewright.interface import HOST

Progress = Callable[[str], None]
Row = dict[str, Any]
_Round = dict[str, list[float]]

BLOCK_SECONDS = 0.03  # short calls are repeated until a round's block takes about this long
MAX_CALLS = 50
OTHERS = 0.15  # a round is disturbed if other processes use more cores than this
PATIENCE = 4  # disturbed rounds are repeated for up to this many times `seconds` and `max_rounds`
DISCARD_BELOW = 0.02  # after another contender, caches are cold: the first of several short calls is not timed


@dataclass(frozen=True)
class Settings:
    """Durations and counts. `seconds` bounds the rounds of one model, `timeout` one request to a process."""

    size: str = "full"
    train: bool = False
    threads: int = 1
    device: str = HOST
    seconds: float = 10.0
    warm_seconds: float = 2.0
    timeout: float = 300.0
    min_rounds: int = 5
    max_rounds: int = 25
    first_call: bool = False
    memory: bool = False
    thorough: bool = False
    """First calls in processes of their own, twice if they are short, plus the time of Dynamo alone."""
    ahead: int = 0
    """Rows prepared in parallel with the one being measured; they are suspended while it is timed."""
    check: Literal["all", "ours", "none"] = "all"
    """Contenders whose results are compared with fp64."""


class ModelFailed(RuntimeError):
    """The model could not be built, or eager could not run it, so there is no baseline."""


@dataclass
class Lane:
    """One contender in its process, and the results of its rounds."""

    contender: Contender
    worker: Worker
    settings: Settings
    calls: int = 1
    discard: int = 0
    compile_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    blocks: list[list[float]] = field(default_factory=list)
    device_s: list[float] = field(default_factory=list)

    def compile(self) -> None:
        """Compile and call once. Raises `WorkerError`."""
        first = self.ask("first")
        self.compile_s, self.notes = first["seconds"], first["notes"]

    def warm_up(self) -> None:
        """Warm up, and choose how many calls make a block. Raises `WorkerError`."""
        call_s = self.ask("warm_up", seconds=self.settings.warm_seconds)["call_s"]
        self.calls = min(MAX_CALLS, max(1, round(BLOCK_SECONDS / max(call_s, 1e-7))))
        self.discard = int(call_s < DISCARD_BELOW)

    def ask(self, do: str, **fields: Any) -> Row:
        """Ask the process about this contender. Raises `WorkerError`."""
        return self.worker.ask(do, self.settings.timeout, contender=self.contender.name, **fields)

    def block(self) -> float:
        """Run one round's block; return its seconds. Raises `WorkerError`."""
        answer = self.ask("block", calls=self.calls, discard=self.discard)
        times, device_s = answer["times"], answer.get("device_s")
        self.blocks.append(times)
        if device_s is None:
            return float(sum(times)) * (1 + self.discard / self.calls)
        self.device_s.append(device_s)
        return float(sum(times)) * (1 + self.discard / self.calls) + device_s * self.calls


def steady(
    load: Row, contenders: Sequence[Contender], settings: Settings, progress: Progress, caches: Mapping[str, Mapping[str, str]]
) -> Row:
    """Return `contenders` (name -> entry), `noise` and the model's `extra`. Raises `ModelFailed`. `caches`: by contender,
    variables with the cache locations of its process.

    Each contender has a process of its own, as in real use: in a process with others, the same eager model took 5 to 40% longer
    here. One that fails, crashes or hangs is marked as failed, the others continue.
    """
    with contextlib.ExitStack() as stack:
        failed: dict[str, Row] = {}
        extra: Row = {}
        lanes = _started(contenders, settings, caches, stack)
        progress(f"building the model for {_named(lanes)}")
        _each(lanes, failed, lambda lane: lane.worker.tell("load", **load))
        _each(lanes, failed, lambda lane: extra.update(lane.worker.answer(settings.timeout)["extra"]))
        judged = [c for c in contenders if c.checked]
        # On a host, our backends time candidate kernels while compiling, so compilation needs a turn too.
        chosen_by_time = [lane for lane in lanes if settings.device == HOST and lane.contender in judged[-1:]]
        compiled_before = [lane for lane in lanes if lane not in chosen_by_time]
        _compile(compiled_before, failed, progress)
        with TURNS.alone([lane.worker.pid for lane in lanes]):
            _compile(chosen_by_time, failed, progress)
            lanes = [*compiled_before, *chosen_by_time]
            _each(lanes, failed, Lane.warm_up)
            progress(f"timing {_named(lanes)}")
            disturbed = run_rounds(lanes, settings, OthersMeter([lane.worker.pid for lane in lanes]), failed)
        held = {"all": judged, "ours": judged[-1:], "none": []}[settings.check]
        return {"extra": extra, "disturbed_rounds": disturbed, **_collect(lanes, failed, held, progress)}


def _started(
    contenders: Sequence[Contender], settings: Settings, caches: Mapping[str, Mapping[str, str]], stack: contextlib.ExitStack
) -> list[Lane]:
    """Start a process for each contender."""

    def lane(contender: Contender) -> Lane:
        env = {**caches[contender.name], **contender.env}
        return Lane(contender, stack.enter_context(TURNS.worker(env, settings.threads)), settings)

    return [lane(contender) for contender in contenders]


def _compile(lanes: list[Lane], failed: dict[str, Row], progress: Progress) -> None:
    """Make each lane's first call, one at a time. A lane that fails is removed."""

    def first(lane: Lane) -> None:
        eager = lane.contender is EAGER
        progress(f"running {EAGER.name}" if eager else f"compiling by {lane.contender.name}")
        lane.compile()

    _each(lanes, failed, first)


def _each(lanes: list[Lane], failed: dict[str, Row], do: Callable[[Lane], None]) -> None:
    """Call `do` for each lane; one that fails is removed from `lanes` and recorded in `failed`."""
    for lane in [*lanes]:
        try:
            do(lane)
        except WorkerError as error:
            _fail(failed, lane.contender, error)
            lanes.remove(lane)


def _named(lanes: Sequence[Lane]) -> str:
    return ", ".join(lane.contender.name for lane in lanes)


def _fail(failed: dict[str, Row], contender: Contender, error: WorkerError) -> None:
    """Record a contender's failure. If it is eager, there is no baseline: raise `ModelFailed`."""
    if contender is EAGER:
        raise ModelFailed(f"eager: {error}") from error
    failed[contender.name] = {"status": "failed", "reason": str(error)}


def run_rounds(lanes: list[Lane], settings: Settings, meter: OthersMeter, failed: dict[str, Row]) -> int:
    """Each round runs every lane once, and starts one lane further than the previous one.

    Rounds continue until the next would exceed `settings.seconds`, within the limits on their number. A round disturbed by
    other processes is dropped and repeated, within the limit of `PATIENCE`; after that disturbed rounds are kept, and their
    number is returned. A lane that fails is removed from `lanes` and recorded in `failed`.
    """
    clean: list[_Round] = []
    disturbed: list[_Round] = []
    spent = wasted = 0.0
    meter.read()
    while len(clean) < settings.min_rounds or (
        len(clean) < settings.max_rounds and spent * (1 + 1 / len(clean)) < settings.seconds
    ):
        seconds, blocks = _round(lanes, len(clean) + len(disturbed), failed)
        if meter.read() <= OTHERS:
            clean.append(blocks)
            spent += seconds
        else:
            disturbed.append(blocks)
            wasted += seconds
        rounds = len(clean) + len(disturbed)
        out_of_time = wasted + spent > PATIENCE * settings.seconds
        if rounds >= settings.min_rounds and (out_of_time or rounds >= PATIENCE * settings.max_rounds):
            break
    kept = clean if len(clean) >= settings.min_rounds else clean + disturbed
    for lane in lanes:
        lane.blocks = [blocks[lane.contender.name] for blocks in kept]
    return len(kept) - len(clean)


def _round(lanes: list[Lane], number: int, failed: dict[str, Row]) -> tuple[float, _Round]:
    """(seconds, result of each lane's block)."""
    seconds, start = 0.0, number % len(lanes)
    for lane in (*lanes[start:], *lanes[:start]):
        try:
            seconds += lane.block()
        except WorkerError as error:
            _fail(failed, lane.contender, error)
            lanes.remove(lane)
    return seconds, {lane.contender.name: lane.blocks.pop() for lane in lanes}


def _collect(lanes: Sequence[Lane], failed: dict[str, Row], checked: Sequence[Contender], progress: Progress) -> Row:
    summaries = {lane.contender.name: summarize(lane.blocks) for lane in lanes}
    eager = summaries[EAGER.name]
    entries: dict[str, Row] = dict(failed)
    for lane in lanes:
        mine = summaries[lane.contender.name]
        entry: Row = {"status": "ok", "steady": mine.as_json(), "compile_s": lane.compile_s}
        entry["speedup"] = paired_ratio(eager.rounds_ms, mine.rounds_ms)
        if lane.device_s:
            entry["device_ms"] = statistics.median(lane.device_s) * 1e3
        if lane.notes:
            entry["notes"] = lane.notes
        if lane.contender in checked:
            progress(f"checking {lane.contender.name} against fp64")
            entry["accuracy"] = _accuracy(lane)
        entries[lane.contender.name] = entry
    return {"contenders": entries, "noise": noise_verdict([summary.spread for summary in summaries.values()])}


def _accuracy(lane: Lane) -> Row:
    try:
        return lane.ask("accuracy")
    except WorkerError as error:
        return {"passed": False, "reason": f"not compared: {error}"}

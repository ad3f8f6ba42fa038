"""Steady state: contenders take turns, round by round, in processes that stay up."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusewright.bench.contenders import EAGER, Contender
from fusewright.bench.load import OthersMeter
from fusewright.bench.stats import noise_verdict, paired_ratio, summarize
from fusewright.bench.worker import Worker, WorkerError

Progress = Callable[[str], None]
Row = dict[str, Any]

BLOCK_SECONDS = 0.03  # short calls are repeated until a round's block lasts about this long
MAX_CALLS = 50
OTHERS = 0.15  # a round in which other processes used more cores than this is disturbed
PATIENCE = 4  # disturbed rounds are replaced for up to this many times `Settings.seconds`
DISCARD_BELOW = 0.02  # a short call that follows another contender's finds cold caches: the first is not timed


@dataclass(frozen=True)
class Settings:
    """How long and how much. `seconds` bounds the rounds of one model, `timeout` one request to a process."""

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


class ModelFailed(RuntimeError):
    """The model could not be built, or eager could not run it: there is nothing to compare with."""


class _Lost(Exception):
    """A process ended or hung while it worked for this contender."""

    def __init__(self, contender: str, reason: str) -> None:
        super().__init__(reason)
        self.contender = contender
        self.reason = reason


@dataclass
class Lane:
    """One contender in one process, and what its rounds gave.

    `of` names the contender that the lane serves: an isolated one has a second lane, eager in its process.
    """

    contender: Contender
    of: str
    worker: Worker
    settings: Settings
    calls: int = 1
    discard: int = 0
    compile_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    blocks: list[list[float]] = field(default_factory=list)

    @property
    def main(self) -> bool:
        return self.contender.name == self.of

    def prepare(self) -> None:
        """Compiles, warms up, and chooses how many calls make a block. Raises `WorkerError` or `_Lost`."""
        first = self.ask("first")
        self.compile_s, self.notes = first["seconds"], first["notes"]
        call_s = self.ask("warm_up", seconds=self.settings.warm_seconds)["call_s"]
        self.calls = min(MAX_CALLS, max(1, round(BLOCK_SECONDS / max(call_s, 1e-7))))
        self.discard = int(call_s < DISCARD_BELOW)

    def ask(self, do: str, **fields: Any) -> Row:
        """The process's answer about this contender. Raises `_Lost` when it took the process down."""
        try:
            return self.worker.ask(do, self.settings.timeout, contender=self.contender.name, **fields)
        except WorkerError as error:
            if error.fatal:
                raise _Lost(self.of, str(error)) from error
            raise

    def block(self) -> float:
        """Runs one round's block; the seconds that it took."""
        try:
            times = self.ask("block", calls=self.calls, discard=self.discard)["times"]
        except WorkerError as error:  # it ran in warm-up and fails now: it cannot stay in the rounds
            raise _Lost(self.of, str(error)) from error
        self.blocks.append(times)
        return float(sum(times)) * (1 + self.discard / self.calls)


def steady(load: Row, contenders: Sequence[Contender], settings: Settings, progress: Progress) -> Row:
    """`contenders` (name -> entry), `noise` and the model's `extra`. Raises `ModelFailed`.

    A contender that takes its process down is marked as failed, and the rest start over without it.
    """
    lost: dict[str, Row] = {}
    while True:
        try:
            row = _attempt(load, [c for c in contenders if c.name not in lost], settings, progress)
        except _Lost as error:
            if error.contender == EAGER.name:
                raise ModelFailed(f"eager: {error.reason}") from error
            lost[error.contender] = {"status": "failed", "reason": error.reason}
            continue
        row["contenders"] |= lost
        return row


def _attempt(load: Row, contenders: Sequence[Contender], settings: Settings, progress: Progress) -> Row:
    with contextlib.ExitStack() as stack:
        lanes: list[Lane] = []
        failed: dict[str, Row] = {}
        extra: Row = {}
        shared = [c for c in contenders if not c.isolated]
        for group in [shared, *([c] for c in contenders if c.isolated)]:
            worker = stack.enter_context(_own_cache_worker(stack, group[0].env, settings))
            try:
                extra |= worker.ask("load", settings.timeout, **load)["extra"]
            except WorkerError as error:
                raise ModelFailed(str(error)) from error
            for contender in group:
                try:
                    lanes += _prepare(contender, worker, settings, progress)
                except WorkerError as error:
                    if contender is EAGER:
                        raise ModelFailed(f"eager: {error}") from error
                    failed[contender.name] = {"status": "failed", "reason": str(error)}
        progress(f"timing {', '.join(lane.contender.name for lane in lanes)}")
        disturbed = run_rounds(lanes, settings, OthersMeter([lane.worker.pid for lane in lanes]))
        return {"extra": extra, "disturbed_rounds": disturbed, **_collect(lanes, failed, progress)}


def _own_cache_worker(stack: contextlib.ExitStack, env: Mapping[str, str], settings: Settings) -> Worker:
    # Our plans and measured choices are made anew, so that figures never come from an older build's cache.
    cache = stack.enter_context(tempfile.TemporaryDirectory(prefix="fusewright-bench-"))
    return Worker({"FUSEWRIGHT_CACHE_DIR": cache, **env}, settings.threads)


def _prepare(contender: Contender, worker: Worker, settings: Settings, progress: Progress) -> Iterator[Lane]:
    for which in (contender, EAGER) if contender.isolated else (contender,):
        progress(f"running {which.name}" if which is EAGER else f"compiling for {which.name}")
        lane = Lane(which, contender.name, worker, settings)
        lane.prepare()
        yield lane


def run_rounds(lanes: Sequence[Lane], settings: Settings, meter: OthersMeter) -> int:
    """Each round runs every lane once, and starts one lane further than the round before.

    Rounds go on until the next one would pass `settings.seconds`, within the bounds of their number. A round in
    which others kept the machine busy is dropped and run again, as long as patience lasts; then the disturbed
    ones stay, and are counted in the result.
    """
    clean: list[list[list[float]]] = []
    disturbed: list[list[list[float]]] = []
    spent = wasted = 0.0
    meter.read()
    while len(clean) < settings.min_rounds or (
        len(clean) < settings.max_rounds and spent * (1 + 1 / len(clean)) < settings.seconds
    ):
        start = (len(clean) + len(disturbed)) % len(lanes)
        seconds = sum(lane.block() for lane in (*lanes[start:], *lanes[:start]))
        blocks = [lane.blocks.pop() for lane in lanes]
        if meter.read() <= OTHERS:
            clean.append(blocks)
            spent += seconds
            continue
        disturbed.append(blocks)
        wasted += seconds
        enough = len(clean) + len(disturbed) >= settings.min_rounds
        if enough and wasted + spent > PATIENCE * settings.seconds:
            break
    kept = clean if len(clean) >= settings.min_rounds else clean + disturbed
    for index, lane in enumerate(lanes):
        lane.blocks = [blocks[index] for blocks in kept]
    return len(kept) - len(clean)


def _collect(lanes: Sequence[Lane], failed: dict[str, Row], progress: Progress) -> Row:
    summaries = {(lane.of, lane.main): summarize(lane.blocks) for lane in lanes}
    shared_eager = summaries[EAGER.name, True]
    entries: dict[str, Row] = dict(failed)
    for lane in (lane for lane in lanes if lane.main):
        mine, own_eager = summaries[lane.of, True], summaries.get((lane.of, False))
        base = own_eager or shared_eager
        entry: Row = {"status": "ok", "steady": mine.as_json(), "compile_s": lane.compile_s}
        entry["speedup"] = paired_ratio(base.rounds_ms, mine.rounds_ms)
        if own_eager:
            entry["own_eager"] = own_eager.as_json()
        if lane.notes:
            entry["notes"] = lane.notes
        if lane.contender.checked:
            progress(f"checking {lane.of} against fp64")
            entry["accuracy"] = _accuracy(lane)
        entries[lane.of] = entry
    return {"contenders": entries, "noise": noise_verdict([summary.spread for summary in summaries.values()])}


def _accuracy(lane: Lane) -> Row:
    try:
        return lane.ask("accuracy")
    except WorkerError as error:
        return {"passed": False, "reason": f"not compared: {error}"}

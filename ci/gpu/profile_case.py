"""One case of `ci/gpu/profiles.py` in a process of its own: `python -m ci.gpu.profile_case JOB`, the fields of a `Job` as JSON.

The process compiles every contender, makes the file `ready` in its folder and waits for the file `go`. Then it times them,
compares their results with eager's and profiles them, and makes the file `done`. `rows.json` and `profile.txt` are rewritten after
each step, so that a process that is ended leaves what it has found.
"""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from fusewright import _torch_compat as compat
from fusewright import report
from fusewright.bench.cases import resolve, resolve_step
from fusewright.bench.contenders import EAGER, Contender, from_backend
from fusewright.bench.device import Clock
from fusewright.bench.suite import DType, TrainStep, flatten_outputs
from fusewright.errors import in_brief
from fusewright.interface import HOST
from fusewright.plan.replay.recording import Recorded

WARM, ROUNDS, QUEUED, PROFILED = 5, 3, 5, 3
"""Calls before the timing, rounds of timed calls, calls in a row without a wait, and calls under the profiler."""
ROUND_SECONDS, CALLS = 0.25, (3, 15)
"""Time for a contender in a round, and the least and the most calls."""
TOP, TOP_RANGES, TOP_OPS = 24, 45, 25
"""Lines of the tables of kernels, of instructions, and of ops that are not ours."""
AGAIN_SECONDS = 5.0
"""After this time the alarm is repeated: an exception that is raised in a callback of the interpreter is lost."""
SEED = 7


@dataclass(frozen=True)
class Job:
    """A case: what to build, whom to compare, and until when (seconds since the epoch) compilers of others may run. `dtype` is
    that of inference; steps run under bf16 autocast."""

    model: str
    mode: str
    backend: str
    against: tuple[str, ...]
    folder: str
    until: float
    device: str = "cuda"
    dtype: DType = "bf16"
    dry: bool = False
    profiled: bool = True

    @property
    def name(self) -> str:
        return f"{self.model}:{self.mode}"

    def contenders(self) -> list[Contender]:
        """Ours first, then eager, to which results are compared, then the others: these are left out when time is short."""
        options: dict[str, Any] = {"fallback": "allow", **({"simulate": True} if self.dry else {})}
        others = [from_backend(name) for name in self.against]
        return [Contender(self.backend, self.backend, options), EAGER, *others]


@dataclass
class Row:
    """One contender of a case; times are medians. `off_*` are relative distances of results (the first, the median and the
    largest of all tensors) from eager's."""

    case: str
    contender: str
    outcome: str = "not ready in time"
    ms: float | None = None
    p10_ms: float | None = None
    ours_over_it: float | None = None
    host_ms: float | None = None
    queued_ms: float | None = None
    kernels: int | None = None
    kernels_ms: float | None = None
    busy_ms: float | None = None
    off_first: float | None = None
    off_median: float | None = None
    off_max: float | None = None
    first_s: float | None = None
    replay: str = ""
    graph_breaks: int | None = None
    words: str = ""


class Late(BaseException):
    """The rest of the time is needed for the timing. No `Exception`, which a compiler would catch."""


@contextlib.contextmanager
def limited(until: float) -> Iterator[None]:
    """Raise `Late` inside the `with` block at a time in seconds since the epoch."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(0.001, until - time.time()), AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Case:
    """A model, its compiled contenders, a row for each, and lines of text."""

    def __init__(self, job: Job) -> None:
        self.job, self.folder = job, Path(job.folder)
        self.clock = Clock(job.device)
        self.rows = {c.name: Row(job.name, c.name) for c in job.contenders()}
        self.lines = [f"==== {job.name}"]
        self.calls: dict[str, Callable[[], Any]] = {}

    def run(self) -> None:
        self.clock.begin()
        torch.set_grad_enabled(self.job.mode == "train")
        self.build()
        self.import_compilers()
        for contender in sorted(self.job.contenders(), key=lambda c: c is not EAGER):  # eager starts the libraries (cuBLAS, cuDNN)
            self._prepare(contender)
            self._save()
        (self.folder / "ready").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.02)
        self._measure_again()
        self._time()
        self._save()
        profiles = (self._profile, self._profile_by_instruction) if self.job.profiled else ()
        for step in (self._compare, *profiles):
            try:
                step()
            except (RuntimeError, ValueError):  # out of memory, or other results than eager's: the other steps can still tell
                self.lines.append(f"-- {step.__name__.strip('_')} failed: {traceback.format_exc()[-800:]}")
            self._save()
        (self.folder / "done").touch()

    def _save(self) -> None:
        part = self.folder / "rows.json.part"
        part.write_text(json.dumps([asdict(r) for r in self.rows.values()]))
        part.replace(self.folder / "rows.json")
        (self.folder / "profile.txt").write_text("\n".join(self.lines) + "\n")

    def _few(self, calls: int) -> int:
        return 1 if self.job.dry else calls

    def build(self) -> None:
        size: Any = "small" if self.job.dry else "full"
        if self.job.mode == "train":
            self.base: Any = resolve_step(self.job.model, size, "amp", self.clock.device)
        else:
            self.base = resolve(self.job.model, size, self.job.dtype, self.clock.device)

    def import_compilers(self) -> None:
        """Compile something small: ours comes first, and would alone pay for the imports of Dynamo and AOTAutograd (a second)."""
        x = torch.ones(2, device=self.clock.device, requires_grad=self.job.mode == "train")
        loss = torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(x)
        if self.job.mode == "train":
            loss.backward()
        torch.compiler.reset()

    def compile(self, contender: Contender) -> Callable[[], Any]:
        if self.job.mode != "train":
            call: Callable[[], Any] = self.base.bind(contender.compile(self.base.fn))
            return call
        step: TrainStep = self.base.fork()
        step.compiled = contender.compile(step.module)
        return step

    def _prepare(self, contender: Contender) -> None:
        """Compile and call; a contender that fails, or for which there is no time, has a row that says so."""
        row, start = self.rows[contender.name], time.monotonic()
        needed = contender.name in (self.job.backend, EAGER.name)
        try:
            with report.recording() as reports, contextlib.nullcontext() if needed else limited(self.job.until):
                call = self.compile(contender)
                for _ in range(self._few(WARM)):
                    call()
                self.clock.wait()
        except Late:
            row.outcome, row.words = "left out", "time was short"
        except Exception as error:  # compilers raise anything; the row says what
            row.outcome, row.words = "failed", in_brief(error)[:200]
            self.lines.append(f"-- {contender.name} failed: {traceback.format_exc()[-1500:]}")
        else:
            self.calls[contender.name] = call
            row.outcome, row.first_s = "compiled, not timed", round(time.monotonic() - start, 1)
        if contender.name == self.job.backend:
            breaks = compat.counted("graph_break")
            row.replay, row.graph_breaks = _replay(reports), sum(breaks.values())
            row.words = next((f"bug: {bug[:200]}" for r in reports for bug in r.bugs), "")
            self.lines += [*_about(reports), *(f"   graph break {n}x: {_one_line(reason)}" for reason, n in breaks.items())]
        gc.collect()
        if self.clock.asynchronous:
            torch.accelerator.empty_cache()

    def _measure_again(self) -> None:
        """Reconsider plans whose recording seemed slower while other cases ran."""
        slower = [r for r in _recorded() if r.given_up.startswith("it is slower")]
        for r in slower:
            self.lines.append(f"-- given up beside other cases: {r.given_up}")
            r.given_up = ""
        for _ in range(WARM if slower else 0):
            self.calls[self.job.backend]()

    def _time(self) -> None:
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in self.calls}
        for _ in range(self._few(ROUNDS)):
            for name, call in self.calls.items():
                call()
                least, most = CALLS
                calls = max(least, min(most, int(ROUND_SECONDS / self.clock.seconds(call))))
                times[name] += [self._timed(call) for _ in range(self._few(calls))]
        ours = self.job.backend
        mine = statistics.median(w for w, _ in times[ours]) if ours in times else None
        for name, found in times.items():
            row, walls = self.rows[name], sorted(w for w, _ in found)
            row.outcome, row.ms = "timed", _ms(statistics.median(walls))
            row.p10_ms, row.host_ms = _ms(walls[len(walls) // 10]), _ms(statistics.median(h for _, h in found))
            row.queued_ms = _ms(self._queued(self.calls[name]))
            row.ours_over_it = None if mine is None or name == ours else round(statistics.median(walls) / mine, 3)

    def _timed(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return the seconds of a call on an idle device, and those until it returned."""
        self.clock.wait()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        self.clock.wait()
        return time.perf_counter() - start, host

    def _queued(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one of several calls in a row, with one wait at their end."""
        calls = self._few(QUEUED)
        return self.clock.seconds(lambda: [call() for _ in range(calls)]) / calls

    def _compare(self) -> None:
        if EAGER.name not in self.calls:
            return
        eager = self._results(EAGER.name)
        for name in [n for n in self.calls if n != EAGER.name]:
            found, row = self._results(name), self.rows[name]
            off = [((a - b).norm() / b.norm().clamp_min(1e-12)).item() for a, b in zip(found, eager, strict=True)]
            row.off_first, row.off_median, row.off_max = (float(f"{x:.2e}") for x in (off[0], statistics.median(off), max(off)))
            k, wrong = off.index(max(off)), sum(not t.isfinite().all() for t in found)
            self.lines.append(
                f"-- {name} is off eager's by {off[0]:.2e} (the first of {len(off)}), median {statistics.median(off):.2e}, most "
                f"{off[k]:.2e} (tensor {k}, {list(eager[k].shape)}, norm {eager[k].norm():.1e}); not finite: {wrong}"
            )

    def _results(self, name: str) -> list[Tensor]:
        """Return the outputs, or the loss and gradients at eager's weights, in fp32."""
        torch.manual_seed(SEED)
        call: Any = self.calls[name]
        if self.job.mode == "train":
            call.module.load_state_dict(self.calls[EAGER.name].module.state_dict())  # type: ignore[attr-defined]
            return [t.float() for t in call.loss_and_grads()]
        return [t.float().clone() for t in flatten_outputs(call()) if t.is_floating_point()]

    def _profiled(self, call: Callable[[], Any], activities: Iterable[ProfilerActivity]) -> profile:
        self.clock.wait()
        with profile(activities=activities) as found:
            for _ in range(self._few(PROFILED)):
                call()
            self.clock.wait()
        return found

    def _profile(self) -> None:
        """Profile the kernels alone: beside ranges of the host, calls take longer."""
        on_host = self.job.device == HOST
        activity = ProfilerActivity.CPU if on_host else ProfilerActivity.CUDA
        calls = self._few(PROFILED)
        for name in [n for n in self.calls if n != EAGER.name]:
            row, events = self.rows[name], on_device(self._profiled(self.calls[name], [activity]), on_host)
            total = sum(end - start for _, start, end in events)
            row.kernels, row.kernels_ms = round(len(events) / calls), round(total / calls / 1e3, 3)
            row.busy_ms = round(covered((start, end) for _, start, end in events) / calls / 1e3, 3)
            self.lines.append(
                f"-- {name}: {row.kernels} kernels a call, sum {row.kernels_ms} ms, busy {row.busy_ms} ms, wall {row.ms} ms"
            )
            self.lines += table(events, calls)

    def _profile_by_instruction(self) -> None:
        """Profile the plain plans, which have a range for each instruction."""
        if self.job.backend not in self.calls:
            return
        recorded = list(_recorded())
        given_up = [r.given_up for r in recorded]
        self.lines.append(f"-- {len(recorded)} plans may be replayed; given up: {[why for why in given_up if why]}")
        on_host = self.job.device == HOST
        activities = [ProfilerActivity.CPU, *([] if on_host else [ProfilerActivity.CUDA])]
        for r in recorded:
            r.given_up = "profiled by instruction"
        try:
            self.calls[self.job.backend]()
            found = self._profiled(self.calls[self.job.backend], activities)
        finally:
            for r, why in zip(recorded, given_up, strict=True):
                r.given_up = why
        self.lines += _ranges(found, self._few(PROFILED), "cpu" if on_host else "device")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _recorded() -> Iterator[Recorded[Any]]:
    for found in gc.get_objects():
        if issubclass(type(found), Recorded):  # isinstance would call properties of proxies
            yield found


def on_device(prof: profile, on_host: bool) -> list[tuple[str, float, float]]:
    """Return the kernels of a profile with their start and end in us; on a host, what no other op called."""
    found = []
    for e in prof.events() or ():
        on_device = e.device_type == DeviceType.CPU and e.cpu_parent is None if on_host else e.device_type != DeviceType.CPU
        if on_device and not e.is_user_annotation and not e.name.startswith(("fusewright ", "##", "ProfilerStep")):
            found.append((e.name, e.time_range.start, e.time_range.end))
    return found


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of a union of intervals: kernels of several streams overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def table(events: Sequence[tuple[str, float, float]], calls: int) -> list[str]:
    sums: Counter[str] = Counter()
    for name, start, end in events:
        sums[name] += end - start  # type: ignore[assignment]
    counts = Counter(name for name, _, _ in events)
    return [_line(us / calls, counts[name] / calls, name) for name, us in sums.most_common(TOP)]


def _ranges(prof: profile, calls: int, timer: str) -> list[str]:
    """Return a line for each of our ranges on the host, and for optimizers', with the device's time of what they launched."""
    found = [
        (getattr(a, f"{timer}_time_total") / calls, a.count / calls, a.key)
        for a in prof.key_averages()
        if a.device_type == DeviceType.CPU and a.key.startswith(("fusewright ", "Optimizer.step"))
    ]
    head = f"-- ours by instruction (plain plan), {len(found)} ranges"
    return [head, *(_line(*each) for each in sorted(found, reverse=True)[:TOP_RANGES])]


def _line(us: float, count: float, name: str) -> str:
    return f"   {us:9.1f} us {count:6.1f}x  {name[:180]}"


def _replay(reports: Sequence[report.GraphReport]) -> str:
    counts = Counter(f"{r.phase} {r.replay or 'without replay'}" for r in reports if not r.superseded)
    return "; ".join(f"{n}x {what}" for what, n in counts.most_common())


def _about(reports: Sequence[report.GraphReport]) -> list[str]:
    """Return lines about our graphs: sizes and stages of each, bugs, and ops that eager's kernels compute."""
    lines = [f"-- ours: {len(reports)} graphs compiled, {sum(r.superseded for r in reports)} of them superseded"]
    for r in reports:
        stages = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in r.stages.items() if seconds >= 0.1)
        lines.append(f"   {r.phase}: {len(r.ops)} ops, {r.regions} regions, replay: {r.replay or 'none'}; {stages}")
        lines += [f"   bug: {bug[:300]}" for bug in r.bugs]
    by_eager = [o for r in reports if not r.superseded for o in r.by_eager]
    counts = Counter(f"{o.where} {o.op}: {str(o.verdict)[:110]}" for o in by_eager)
    return [*lines, *(f"   {n:4d}x {what}" for what, n in counts.most_common(TOP_OPS))]


def main(argv: Sequence[str] | None = None) -> None:
    fields = json.loads((sys.argv[1:] if argv is None else argv)[0])
    Case(Job(**{**fields, "against": tuple(fields["against"])})).run()


if __name__ == "__main__":
    main()

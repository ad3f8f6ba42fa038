"""Programs in a process of their own: contenders compiled, timed in turns, or judged by fp64.

The process says `@ready` once all is compiled and waits for a line before it times anything, so that its parent can suspend others.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ci.programs.program import Program, Size, inputs, size_within
from fusewright.accuracy import compare
from fusewright.bench.accuracy import wide_arithmetic
from fusewright.bench.device import Clock, computes_fp64

CALLS, BLOCK_S = 20, 0.03
"""Most calls of a block, and its seconds."""
WARM_CALLS = 250
"""Calls of ours before it is timed, if they fit into the seconds: a plan is compared with eager in its first ones."""
CHECKED = 3
"""Calls before results are judged: the first that a device replays."""
MARK = "@"

Found = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """What a process does."""

    suite: str
    program: str
    dtype: str = "float32"
    mode: str = "inference"
    contenders: Sequence[str] = ("eager", "inductor", "ours")
    backend: str = "x86_onednn"
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    small: bool = False
    gigabytes: float = 0.0
    rounds: int = 5
    warm_s: float = 1.0
    check: bool = False

    @property
    def training(self) -> bool:
        return self.mode == "training"

    @property
    def precision(self) -> str:
        """As `fusewright.accuracy` names it."""
        return "fp32" if self.dtype == "float32" else "amp" if self.training else "bf16"

    @property
    def storage(self) -> torch.dtype:
        """The type of weights and inputs."""
        return torch.float32 if self.training else getattr(torch, self.dtype)


class Case:
    """A module with its inputs, and calls of it by each contender, which have copies of the module."""

    def __init__(self, job: Job) -> None:
        self.job, self.clock = job, Clock(job.device)
        self.clock.begin()
        program: Program = importlib.import_module(f"ci.programs.{job.suite}").PROGRAMS[job.program]
        size = Size(small=job.small)
        if job.gigabytes and not job.small:
            size = size_within(program, job.storage.itemsize, job.gigabytes * 1e9)
        torch.manual_seed(0)
        with torch.device(job.device):
            module, self.given = program(size)
        self.module = module.to(job.storage).train(job.training)
        for part in self.module.modules():
            if isinstance(part, nn.Dropout) and job.check:
                part.eval()  # the masks of fp64 are others
        self.inputs = inputs(self.given, job.device, job.storage)
        self.cotangent: Tensor | None = None

    def call(self, contender: str) -> Callable[[], list[Tensor]]:
        """Results of a call: the output, and gradients in training."""
        module = copy.deepcopy(self.module)
        return self._call(module, self._compiled(contender, module), self.inputs)

    def _compiled(self, contender: str, module: nn.Module) -> Callable[..., Tensor]:
        if contender == "eager":
            return module
        ours = contender == "ours"
        options = dict(self.job.options) if ours else {}
        run: Callable[..., Tensor] = torch.compile(module, backend=self.job.backend if ours else contender, options=options or None)
        return run

    def _call(self, module: nn.Module, run: Callable[..., Tensor], args: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        if not self.job.training:
            return torch.no_grad()(lambda: [run(*args)])
        args = [x.detach().clone().requires_grad_(g.floating and g.grad) for x, g in zip(args, self.given, strict=True)]
        wanted = [x for x in (*args, *module.parameters()) if x.requires_grad]
        narrow = self.job.precision == "amp" and args[0].dtype is not torch.float64
        half = torch.autocast(args[0].device.type, torch.bfloat16, enabled=narrow)

        def step() -> list[Tensor]:
            with half:
                out = run(*args)
            if self.cotangent is None:
                generator = torch.Generator(out.device).manual_seed(1)
                self.cotangent = torch.rand(out.shape, generator=generator, device=out.device).to(out.dtype)
            found = torch.autograd.grad(out, wanted, self.cotangent.to(out), allow_unused=True)
            return [out.detach(), *(g for g in found if g is not None)]

        return step

    def wide(self) -> list[Tensor]:
        """The same call in fp64, on the host if the device has none."""
        place = self.job.device if computes_fp64(self.job.device) else "cpu"
        module = copy.deepcopy(self.module).to(place).double()
        args = [x.to(place).double() if x.is_floating_point() else x.to(place) for x in self.inputs]
        with wide_arithmetic():
            return self._call(module, module, args)()


def _differentiable(case: Case) -> bool:
    """Whether the output has a gradient: positions of extremes have none."""
    args = [x.detach().clone().requires_grad_(g.floating and g.grad) for x, g in zip(case.inputs, case.given, strict=True)]
    return bool(copy.deepcopy(case.module)(*args).requires_grad)


def judged(case: Case, contender: str) -> Found:
    """The contender's results beside eager's and those of fp64: shapes, types, strides of the output, and errors."""
    run, eager = case.call(contender), case.call("eager")()
    for _ in range(CHECKED):
        ours = run()
    found = compare(case.wide(), eager, ours, case.job.precision)
    reason = found.reason
    if not reason and contender == "ours" and _strides(ours[0]) != _strides(eager[0]):
        reason = f"strides {ours[0].stride()}, eager's {eager[0].stride()}"
    ratio = round(max(found.ratio_max, found.ratio_rms), 3)
    return {"outcome": "wrong" if reason else "right", "error ratio": ratio, "words": reason}


def _strides(x: Tensor) -> list[int]:
    return [s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]


def timed(case: Case, wait: Callable[[], None]) -> Found:
    """ms of each contender, the median over rounds in turns, and seconds of first calls. `wait` returns once nothing else runs."""
    job, clock = case.job, case.clock
    calls: dict[str, Callable[[], Any]] = {}
    first: dict[str, float] = {}
    for name in job.contenders:
        start = time.perf_counter()
        calls[name] = case.call(name)
        calls[name]()
        clock.wait()
        first[name] = time.perf_counter() - start
    wait()
    blocks = {name: _warmed(clock, call, WARM_CALLS if name == "ours" else 3, job.warm_s) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for k in range(job.rounds):
        for name in list(calls)[:: -1 if k % 2 else 1]:
            times[name].append(_block(clock, calls[name], blocks[name]))
    found: Found = {name: round(statistics.median(t) * 1e3, 4) for name, t in times.items()}
    others = [found[name] for name in found if name != "ours"]
    if "ours" in found and others:
        found["ratio"] = round(min(others) / found["ours"], 3)
    return found | {f"{name} first call s": round(s, 2) for name, s in first.items() if name != "eager"}


def _warmed(clock: Clock, call: Callable[[], Any], calls: int, seconds: float) -> int:
    """Call some times; return the calls of a block."""
    end, last = time.perf_counter() + seconds, [clock.seconds(call) for _ in range(3)]
    for _ in range(calls - len(last)):
        if time.perf_counter() > end:
            break
        last.append(clock.seconds(call))
    return min(CALLS, max(1, round(BLOCK_S / max(min(last[-3:]), 1e-7))))


def _block(clock: Clock, call: Callable[[], Any], calls: int) -> float:
    """Seconds of one call of a block, after one that restores the contender's caches."""
    call()
    if (queued := clock.queued(call, calls)) is not None:
        return queued
    return statistics.fmean(clock.seconds(call) for _ in range(calls))


def run(job: Job, wait: Callable[[], None]) -> Found:
    """Judge or time a program."""
    case = Case(job)
    if job.training and not _differentiable(case):
        return {"outcome": "no gradient"}
    with torch.set_grad_enabled(job.training):
        if not job.check:
            return {"outcome": "timed", **timed(case, wait)}
        checked = {name: judged(case, name) for name in job.contenders if name != "eager"}
    return checked["ours"] | {f"{name} words": found["words"] for name, found in checked.items() if name != "ours"}


def main(text: str) -> int:
    """Run the jobs of a text one by one; say what was found of each in a marked line."""

    def wait() -> None:
        print(f"{MARK}ready", flush=True)
        input()

    for fields in json.loads(text):
        torch.compiler.reset()
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()
        print(MARK + json.dumps(run(Job(**fields), wait)), flush=True)
    return 0

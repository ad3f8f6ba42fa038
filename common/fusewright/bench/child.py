"""The measuring process: `python -m fusewright.bench.child` reads one JSON request per line on stdin and answers likewise.

A separate process per model isolates memory, compiler state and crashes; new processes time the first call. The parent decides
what runs when (`fusewright.bench.measure`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch

from fusewright.bench import accuracy
from fusewright.bench.cases import resolve, resolve_step
from fusewright.bench.cases.kernels import is_kernel
from fusewright.bench.contenders import COPY, EAGER, Contender, from_backend
from fusewright.bench.device import Clock
from fusewright.bench.suite import Built, TrainStep, flatten_outputs
from fusewright.interface import HOST

STABLE = 0.05
"""Warm-up ends when three consecutive calls are within this share of the fastest so far."""
REPLAYED = 3
"""Training steps until one is replayed, if the device supports graphs; the replayed one is compared."""
SETTLE = 0.005
"""OpenMP threads spin for some milliseconds after the last call; wait so that they sleep before the next turn."""


class Server:
    """The state of one measuring process: one loaded model, and the contenders that are compiled for it."""

    def __init__(self) -> None:
        self.built: Built | None = None
        self.step: TrainStep | None = None
        self.ready: dict[str, Callable[[], Any]] = {}
        self.wide: list[torch.Tensor] | None = None
        self.eager: list[torch.Tensor] = []
        self.notes = _Notes()
        self.clock, self.queued = Clock(), False

    # Each public method is one request; its keyword arguments are the request's fields.

    def load(self, model: str, dtype: str, size: str, train: bool, threads: int, device: str = HOST) -> dict[str, Any]:
        """Build a model on a device, dropping the previous one."""
        if self.ready:  # not otherwise: reset imports Dynamo, which is part of a first call
            torch.compiler.reset()
        self.ready, self.wide, self.eager = {}, None, []
        self.built = self.step = None
        torch.set_num_threads(threads)
        self.clock, self.queued = Clock(device), is_kernel(model)
        self.clock.begin()
        if train:
            self.step = resolve_step(model, size, dtype, device)  # type: ignore[arg-type]
        else:
            self.built = resolve(model, size, dtype, device)  # type: ignore[arg-type]
        return {"extra": dict(self.built.extra) if self.built else {}}

    def first(self, contender: str) -> dict[str, Any]:
        """Compile and call once; return the seconds from `torch.compile` to the first result, including imports of the
        compiler."""

        def compiled() -> None:
            self.ready[contender] = call = self._compile(_contender(contender))
            call()

        with self._grad_mode():
            seconds = self.clock.seconds(compiled)
        return {"seconds": seconds, "notes": self.notes.take()}

    def warm_up(self, contender: str, seconds: float) -> dict[str, Any]:
        """Call until times are stable or `seconds` have passed (at least three calls)."""
        call, start = self.ready[contender], time.perf_counter()
        times: list[float] = []
        with self._grad_mode():
            while len(times) < 3 or (time.perf_counter() - start < seconds and not _stable(times)):
                times.append(self.clock.seconds(call))
        return {"call_s": min(times[-3:])}

    def block(self, contender: str, calls: int, discard: int) -> dict[str, Any]:
        """Time `calls` consecutive calls after `discard` untimed ones (which restore this contender's caches). `device_s` is
        the device time of one call; a single kernel is judged by that alone, because the host takes longer for its call."""
        call = self.ready[contender]
        with self._grad_mode():
            for _ in range(discard):
                call()
            if self.queued and (device_s := self.clock.queued(call, calls)) is not None:
                return {"times": [device_s]}
            times = [self.clock.seconds(call) for _ in range(calls)]
            device_s = self.clock.queued(call, calls)
        time.sleep(SETTLE)
        return {"times": times} if device_s is None else {"times": times, "device_s": device_s}

    def accuracy(self, contender: str) -> dict[str, Any]:
        """The contender's error against fp64 beside eager's. Training compares loss and gradients at the initial weights."""
        if self.wide is None:
            self._make_reference()
        assert self.wide is not None
        if self.step is not None:
            step = self.step.repeatable()
            step.compiled = _contender(contender).compile(step.module)
            for _ in range(REPLAYED):
                outputs = step.loss_and_grads()
            dtype = step.dtype
        else:
            assert self.built is not None
            with torch.no_grad():
                outputs, dtype = flatten_outputs(self.ready[contender]()), self.built.dtype
        return accuracy.compare(self.wide, self.eager, outputs, dtype).as_json()

    def memory(self, contender: str, calls: int) -> dict[str, Any]:
        """Memory (bytes) around steady calls, on the device or else resident: before the calls, and the peak during them."""
        call = self.ready[contender]
        with self._grad_mode():
            for _ in range(3):
                call()
            if self.clock.asynchronous:
                return self.clock.memory(call)
            before = _status("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark to the current resident size
            for _ in range(calls):
                call()
        return {"resident": before, "peak": _status("VmHWM")}

    def _make_reference(self) -> None:
        if self.step is not None:
            self.wide, self.eager = accuracy.train_reference(self.step), self.step.repeatable().loss_and_grads()
        else:
            assert self.built is not None
            self.wide = accuracy.reference(self.built)
            with torch.no_grad():
                self.eager = flatten_outputs(self.built.run())

    def _compile(self, contender: Contender) -> Callable[[], Any]:
        if self.step is not None:
            step = self.step.fork()
            step.compiled = contender.compile(step.module)
            return step
        if self.built is None:
            raise RuntimeError("no model is loaded")
        if contender.copies:
            source = torch.empty(self.built.extra["bytes"] // 2, dtype=torch.uint8, device=self.built.device).fill_(1)
            times = self.built.extra.get("tokens", 1)
            return source.clone if times == 1 else lambda: [source.clone() for _ in range(times)][-1]
        return self.built.bind(contender.compile(self.built.fn))

    def _grad_mode(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(self.step is not None)


class _Notes(logging.Handler):
    """Collects warnings that the project's code logs while compiling, to print beside the figures."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []
        logging.getLogger("fusewright").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self._lines = list(dict.fromkeys(self._lines)), []
        return lines


def _contender(name: str) -> Contender:
    plain = {contender.name: contender for contender in (EAGER, COPY)}
    return plain[name] if name in plain else from_backend(name)


def _stable(times: list[float]) -> bool:
    return max(times[-3:]) <= (1 + STABLE) * min(times)


def _status(key: str) -> int:
    match = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"/proc/self/status has no {key}")
    return int(match[1]) * 1024


REQUESTS = ("load", "first", "warm_up", "block", "accuracy", "memory")


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until stdin ends. A request that raises is answered with `error`, and the process continues."""
    server = Server()
    for line in requests:
        request = json.loads(line)
        name = request.pop("do")
        if name not in REQUESTS:
            raise ValueError(f"unknown request {name!r}")
        try:
            answer = getattr(server, name)(**request)
        except Exception as error:  # the parent reports it as this contender's failure
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    # Libraries print to stdout: keep a separate descriptor for answers, and redirect descriptor 1 to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()

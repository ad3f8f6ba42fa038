"""A process of `ci/gpu/check.py`: it answers requests, all of them dicts of JSON's types.

    {"do": "first", "model": "bert", "part": "inference", "contender": "ours"}   {"seconds": 4.1}
    {"do": "round", "model": "bert", "part": "inference", "contender": "ours"}   {"ms": 5.0}

It says {"ready": True} when everything is imported and the GPU's libraries are loaded, which no first call is to pay for.
Compilers' caches are where the environment says. A request with "patient": True is tried once more when it was out of the
device's memory, which another process may have held for a moment.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from ci.gpu.models import MODELS, Decoding
from fusewright import report
from fusewright.bench import accuracy, suite

OURS: Any = {"backend": "nvidia_triton", "options": {"fallback": "allow"}}
CONTENDERS: Mapping[str, Any] = {
    "inductor": {}, "reduce-overhead": {"mode": "reduce-overhead"}, "ours": OURS, "dynamo": {"backend": "eager"},
}  # fmt: skip
"""Of `torch.compile`. Dynamo alone is what no first call can be faster than."""
SETTLE, CALLS = 4, 8
"""Calls before the first round, and of a round."""
STEPS = 32
"""Tokens that are decoded one behind the other."""
TIE = 0.02
"""Two tokens are as likely when their logits differ by less than this share of the largest one: a few roundings of bf16."""
BATCH = 4
"""The suite's example inputs are repeated so many times: blocks are then partly and wholly filled."""

Call = Callable[[], Any]


def release() -> None:
    """Give the device's memory that is not in use back to other processes."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def median_ms(call: Call, calls: int = CALLS, before: Call = lambda: None) -> float:
    """Median time of a call in ms, by events around it, each on an idle GPU. `before` each call something is done untimed."""
    times = []
    for _ in range(calls):
        before()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def seconds_of(call: Call) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


# ---------------------------------------------------------------- times


class Timed:
    """What is timed in this process: one call for each model, part and contender, made when it is first asked for."""

    def __init__(self) -> None:
        self.parts: dict[tuple[str, str], tuple[torch.nn.Module, Callable[[Any], Call]]] = {}
        self.calls: dict[tuple[str, str, str], Call] = {}
        self.settled: set[tuple[str, str, str]] = set()
        self.decodings: dict[str, Decoding] = {}

    def ready(self, model: str, part: str) -> dict[str, Any]:
        """The model is on the GPU and eager has run: its libraries are loaded."""
        self._call(model, part, "eager")()
        release()
        return {}

    def first(self, model: str, part: str, contender: str) -> dict[str, Any]:
        """Seconds of the call that compiles, once eager has run. No training step runs beforehand: it would take more
        memory than the compiled ones."""
        if part != "training":
            self.ready(model, part)
        call = self.calls[model, part, contender] = self._call(model, part, contender)
        seconds = seconds_of(call)
        for module, _ in self.parts.values():
            module.zero_grad(set_to_none=True)
        release()
        return {"seconds": seconds}

    def round(self, model: str, part: str, contender: str) -> dict[str, Any]:
        key = (model, part, contender)
        call = self.calls[key] = self.calls.get(key) or self._call(*key)
        if key not in self.settled:
            self.settled.add(key)
            for _ in range(1 if part == "decode" else SETTLE):
                call()
        if part == "decode":
            return {"ms": median_ms(call, 2, self.decodings[contender].restore) / STEPS}
        return {"ms": median_ms(call)}

    def _call(self, model: str, part: str, contender: str) -> Call:
        def compile(fn: Any) -> Any:
            return fn if contender == "eager" else torch.compile(fn, **CONTENDERS[contender])

        if part == "decode":
            return self._decode(contender, compile)
        if (model, part) not in self.parts:
            self.parts[model, part] = {"inference": inference, "training": training}[part](model)
        return self.parts[model, part][1](compile)

    def _decode(self, contender: str, compile: Any) -> Call:
        """Decoding as it is used: STEPS tokens, one issued behind the other, the likeliest appended. Its time is given for one."""
        if contender not in self.decodings:
            self.decodings[contender] = Decoding(compile)
        self.decodings[contender].restore()
        return without_gradients(lambda: self.decodings[contender].decode(STEPS))

    def decode_alone(self, contender: str) -> dict[str, Any]:
        """Time of a single step on an idle GPU."""
        decoding = self.decodings[contender]
        decoding.restore()
        return {"ms": median_ms(without_gradients(decoding.step))}

    def decode_agrees(self) -> dict[str, Any]:
        """Whether ours gives eager's tokens, each from the same tokens before it. Where it gives another one, the two must
        be as likely in eager, up to rounding."""
        for contender in ("eager", "ours"):
            self._call("decode", "decode", contender)
        with torch.no_grad():
            for decoding in self.decodings.values():
                decoding.restore()
            found: list[torch.Tensor] = []
            tokens = self.decodings["eager"].decode(STEPS, logits=found)
            ours = self.decodings["ours"].decode(STEPS, tokens)
        logits = torch.cat(found).float()
        lost = logits.gather(1, tokens[:, None]) - logits.gather(1, ours[:, None])
        tied = lost.flatten() <= TIE * logits.abs().amax(1)
        return {"tokens": STEPS, "equal": int((ours == tokens).sum()), "wrong": int((~tied).sum())}

    def bandwidth(self) -> dict[str, Any]:
        """GB/s of a device copy, reads and writes counted, and the bytes that one decoding step reads."""
        source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").zero_()
        target = torch.empty_like(source)
        best = min(median_ms(lambda: target.copy_(source)) for _ in range(3))
        read = next(iter(self.decodings.values())).bytes
        return {"copy_gb_s": 2 * 2 * source.numel() / best / 1e6, "bytes": read}


def without_gradients(call: Call) -> Call:
    def run() -> Any:
        with torch.no_grad():
            return call()

    return run


def inference(model: str) -> tuple[torch.nn.Module, Callable[[Any], Call]]:
    """A model, and a call of it in bf16 when compiled in a way."""
    module, inputs, _ = MODELS[model].build()
    module.bfloat16()
    given = {k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}

    def made(compile: Any) -> Call:
        fn = compile(module)
        return without_gradients(lambda: fn(**given))

    return module, made


def training(model: str) -> tuple[torch.nn.Module, Callable[[Any], Call]]:
    """A model, and forward and backward of it under bf16 autocast, fp32 weights, dropout as configured."""
    module, inputs, labels = MODELS[model].build()
    module.train()

    def made(compile: Any) -> Call:
        fn = compile(module)

        def step() -> None:
            module.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = fn(**inputs, **labels).loss
            loss.backward()

        return step

    return module, made


# ---------------------------------------------------------------- right or wrong


def on_gpu(built: suite.Built) -> suite.Built:
    """The model on the GPU, its example inputs repeated along the batch."""

    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.repeat(BATCH, *[1] * (x.dim() - 1)).cuda() if x.dim() else x.cuda()

    assert built.module is not None
    args, kwargs = tuple(map(move, built.args)), {k: move(v) for k, v in built.kwargs.items()}
    return dataclasses.replace(built, fn=built.module.cuda(), args=args, kwargs=kwargs)


def _verdict(model: str, dtype: Any, found: accuracy.Accuracy, reports: list[report.GraphReport]) -> dict[str, Any]:
    return {
        "model": model, "dtype": dtype, "right": found.passed, "ratio": found.ratio_max, "reason": found.reason,
        "replay": [r.replay for r in reports if r.replay], "eager_ops": sum(r.count("eager") for r in reports),
        "bugs": [b for r in reports for b in r.bugs][:3],
    }  # fmt: skip


@torch.no_grad()
def check(model: str, dtype: suite.DType) -> dict[str, Any]:
    """A model of the suite by the fp64 rule, at its third call: what is replayed is what is judged."""
    built = on_gpu(suite.build(model, "full", dtype))
    eager = suite.flatten_outputs(built.run())
    with report.recording() as reports:
        ours = torch.compile(built.fn, **OURS)
        for _ in range(3):
            got = suite.flatten_outputs(built.run(ours))
    return _verdict(model, dtype, accuracy.compare(accuracy.reference(built), eager, got, dtype), reports)


def check_training(model: str) -> dict[str, Any]:
    """Loss and gradients under bf16 autocast by the fp64 rule, at the third step."""
    step = suite.train_step(model, "full", "fp32")
    step.module.cuda()
    batch = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in step.batch.items()}

    def grads(module: torch.nn.Module, fn: Any, amp: bool, given: dict[str, Any]) -> list[torch.Tensor]:
        module.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            loss = fn(**given).loss
        loss.backward()
        return [loss.detach().clone(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    wide = copy.deepcopy(step.module).double()
    doubled = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in batch.items()}
    reference = grads(wide, wide, False, doubled)
    eager_module = copy.deepcopy(step.module)
    eager = grads(eager_module, eager_module, True, batch)
    with report.recording() as reports:
        fn = torch.compile(step.module, **OURS)
        for _ in range(3):
            got = grads(step.module, fn, True, batch)
    return _verdict(model, "amp", accuracy.compare(reference, eager, got, "amp"), reports)


# ---------------------------------------------------------------- requests


def load_libraries() -> None:
    """A context on the GPU, cuBLAS and cuDNN: seconds of a process on some hosts."""
    if torch.cuda.is_available():
        x = torch.ones(1, 8, 16, 16, device="cuda", dtype=torch.bfloat16)
        torch.nn.functional.conv2d(x @ x, x)
        torch.nn.functional.scaled_dot_product_attention(x, x, x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def serve(connection: Connection, jobs: int = 0) -> None:
    """Answer requests until the other end is closed. Our compiler starts at most `jobs` processes and torch half as many
    threads; 0: as many as there are cores."""
    import transformers

    transformers.logging.set_verbosity_error()
    if jobs:
        os.environ["FUSEWRIGHT_TRITON_WORKERS"] = str(jobs)
        torch.set_num_threads(max(1, jobs // 2))
    timed = Timed()
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "ready": timed.ready, "first": timed.first, "round": timed.round, "bandwidth": timed.bandwidth, "check": check,
        "check_training": check_training, "decode_alone": timed.decode_alone, "decode_agrees": timed.decode_agrees,
    }  # fmt: skip
    load_libraries()
    connection.send({"ready": True})
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        do = request.pop("do")
        connection.send(answered(commands[do], request, request.pop("patient", False)))
        if "check" in do:  # what one check held must not stand in the way of the next
            torch.compiler.reset()
            release()


def answered(command: Callable[..., dict[str, Any]], request: Mapping[str, Any], patient: bool) -> dict[str, Any]:
    """The answer, or an error."""
    try:
        return command(**request)
    except Exception as e:  # whatever a model or a compiler raises is an answer; the parent says what was left out
        if not (patient and isinstance(e, torch.OutOfMemoryError)):
            return {"error": f"{type(e).__name__}: {str(e)[:300]}"}
    release()
    time.sleep(5)
    return answered(command, request, patient=False)

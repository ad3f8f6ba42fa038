"""Check and time `nvidia_triton` on a GPU. Prints tables last, and writes a record.

    python ci/gpu_check.py [--parts inference,train-table,accuracy,training,decode] [--models bert,vit] [--json out.json]

- inference (bf16) and train-table (forward and backward under bf16 autocast), at sizes that fill the GPU
  (`gpu_models.py`): eager, Inductor, Inductor with mode="reduce-overhead" and ours, and the first calls
- accuracy: every model of the suite in bf16 and fp32 against fp64
- training: loss and gradients of the suite's training steps against fp64, after replays
- decode: one token of a 1 B parameter model with a static key-value cache

A model that fails is shown with its reason, and the rest goes on.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu_models import MODELS, GpuModel, decoder  # type: ignore[import-not-found]

from fusewright import report
from fusewright.bench import accuracy, suite
from fusewright.bench.stats import geomean

OURS: Any = {"backend": "nvidia_triton", "options": {"cache": False, "fallback": "allow"}}
CONTENDERS: Mapping[str, Any] = {
    "inductor": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "ours": OURS,
}
ROUNDS = 5
"""Rounds of calls; the best round's median counts."""

Call = Callable[[], Any]


def median_ms(call: Call, runs: int = 8) -> float:
    """Median time of a call in ms, by events around it, each on an idle GPU."""
    times = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def first_call(call: Call) -> float:
    """Seconds of a call that compiles."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def best_ms(calls: Mapping[str, Call]) -> dict[str, float]:
    """The median time of each call in its best round."""
    for call in calls.values():
        for _ in range(4):
            call()
    rounds = [{name: median_ms(call) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: min(r[name] for r in rounds) for name in calls}


def inference(model: GpuModel, names: list[str]) -> dict[str, Any]:
    """Times of a call without gradients, in bf16."""
    module, inputs, _ = model.build()
    module.bfloat16()
    given = {k: v.bfloat16() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in inputs.items()}
    times, firsts = {}, {}
    with torch.no_grad():
        for name in ("eager", *names):  # one after the other: graphs of one must not hold memory of another
            torch.compiler.reset()
            fn = module if name == "eager" else torch.compile(module, **CONTENDERS[name])
            if name != "eager":
                firsts[name] = first_call(lambda: fn(**given))  # noqa: B023
            times[name] = best_ms({name: lambda: fn(**given)})[name]  # noqa: B023
    return {"ms": times, "first_s": firsts}


def training(model: GpuModel, names: list[str]) -> dict[str, Any]:
    """Times of forward and backward under bf16 autocast, fp32 weights, dropout as configured."""
    module, inputs, labels = model.build()
    module.train()

    def step(fn: Any) -> None:
        module.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = fn(**inputs, **labels).loss
        loss.backward()

    times, firsts = {}, {}
    for name in ("eager", *names):
        torch.compiler.reset()
        fn = module if name == "eager" else torch.compile(module, **CONTENDERS[name])
        if name != "eager":
            firsts[name] = first_call(lambda: step(fn))  # noqa: B023
        times[name] = best_ms({name: lambda: step(fn)})[name]  # noqa: B023
    return {"ms": times, "first_s": firsts}


def table(names: list[str], parts: set[str]) -> list[dict[str, Any]]:
    """Rows of the big table."""
    rows = []
    for name in names:
        row: dict[str, Any] = {"model": name, "label": MODELS[name].label}
        for part, run, contenders in (
            ("inference", inference, ["inductor", "reduce-overhead", "ours"]),
            ("training", training, ["inductor", "ours"]),
        ):
            if part not in parts:
                continue
            try:
                row[part] = run(MODELS[name], contenders)
            except Exception as e:  # one model must not end the run; the table says so
                row[part] = {"error": f"{type(e).__name__}: {str(e)[:300]}"}
            print(row["label"], part, json.dumps(row[part]), flush=True)
            clean()
        rows.append(row)
    return rows


def clean() -> None:
    """Free what the last model held."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(built: suite.Built, batch: int) -> suite.Built:
    """The model on the GPU, its example inputs repeated along the batch."""

    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.repeat(batch, *[1] * (x.dim() - 1)).cuda() if x.dim() else x.cuda()

    assert built.module is not None
    args = tuple(map(move, built.args))
    return dataclasses.replace(
        built, fn=built.module.cuda(), args=args, kwargs={k: move(v) for k, v in built.kwargs.items()}
    )


@torch.no_grad()
def check(name: str, dtype: suite.DType, batch: int = 4) -> dict[str, Any]:
    """A model of the suite by the fp64 rule, at its third call: what is replayed is what is judged."""
    built = on_gpu(suite.build(name, "full", dtype), batch)
    eager = suite.flatten_outputs(built.run())
    with report.recording() as reports:
        ours = torch.compile(built.fn, **OURS)
        seconds = first_call(built.bind(ours))
        for _ in range(2):
            got = suite.flatten_outputs(built.run(ours))
    verdict = accuracy.compare(accuracy.reference(built), eager, got, dtype)
    return {
        "model": name, "dtype": dtype, "right": verdict.passed, "ratio": verdict.ratio_max, "reason": verdict.reason,
        "first_s": seconds, "replay": [r.replay for r in reports if r.replay],
        "eager_ops": sum(r.count("eager") for r in reports), "bugs": [b for r in reports for b in r.bugs][:3],
    }  # fmt: skip


def check_training(name: str) -> dict[str, Any]:
    """Loss and gradients under bf16 autocast by the fp64 rule, at the third step."""
    step = suite.train_step(name, "full", "fp32")
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
    verdict = accuracy.compare(reference, eager, got, "amp")
    replay = [r.replay for r in reports]
    return {
        "model": name,
        "right": verdict.passed,
        "ratio": verdict.ratio_max,
        "reason": verdict.reason,
        "replay": replay,
    }


def guarded(rows: list[dict[str, Any]], label: str, run: Callable[[], dict[str, Any]]) -> None:
    """Run one check; a failure becomes a row."""
    try:
        rows.append(run())
    except Exception as e:  # one model must not end the run; its row says so
        rows.append({"model": label, "right": False, "reason": f"{type(e).__name__}: {str(e)[:300]}"})
    print(json.dumps(rows[-1]), flush=True)
    clean()


@torch.no_grad()
def decode() -> dict[str, Any]:
    """Milliseconds a token, and the share of the floor: bytes of weights and cache over the bandwidth of a read."""
    found: dict[str, Any] = {}
    for name in ("eager", "reduce-overhead", "ours"):
        torch.compiler.reset()
        step, bytes_read = decoder(lambda f, n=name: f if n == "eager" else torch.compile(f, **CONTENDERS[n]))
        first = first_call(step)
        found[name] = {"ms": best_ms({name: step})[name], "first_s": first}
        found["bytes"] = bytes_read
        del step
        clean()
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").zero_()
    target = torch.empty_like(source)
    copy_ms = best_ms({"copy": lambda: target.copy_(source)})["copy"]
    found["copy_gb_s"] = 2 * 2 * source.numel() / copy_ms / 1e6
    found["floor_ms"] = found["bytes"] / found["copy_gb_s"] / 1e6
    found["share"] = found["floor_ms"] / found["ours"]["ms"]
    return found


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Prints the table; geomeans of the bars."""
    head = ("eager", "inductor", "reduce-overhead", "ours")
    ratios: dict[str, list[float]] = {}
    for part in ("inference", "training"):
        print(f"\n{part}: ms" + "".join(f"{h:>17}" for h in head) + "   first call, s: inductor / r-o / ours")
        for row in rows:
            found = row.get(part)
            if found is None or "error" in found:
                print(f"{row['label']:22} {(found or {}).get('error', '')}")
                continue
            ms, first = found["ms"], found["first_s"]
            cells = "".join(f"{ms[h]:17.2f}" if h in ms else " " * 17 for h in head)
            print(f"{row['label']:22}" + cells + "   " + " / ".join(f"{v:.1f}" for v in first.values()))
            for other in ("eager", "inductor", "reduce-overhead"):
                if other in ms:
                    ratios.setdefault(f"{part} over {other}", []).append(ms[other] / ms["ours"])
            ratios.setdefault(f"{part} first call", []).append(first["inductor"] / first["ours"])
    bars = {name: geomean(values) for name, values in ratios.items()}
    print("\n" + "\n".join(f"geomean {name}: {value:.2f}x" for name, value in bars.items()))
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="inference,train-table,accuracy,training,decode")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--suite", default=",".join(suite.SUITE), help="models of the suite for 'accuracy'")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    parts = set(given.parts.split(","))
    record: dict[str, Any] = {
        "version": 2, "torch": torch.__version__, "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda,
    }  # fmt: skip
    if "decode" in parts:
        try:
            record["decode"] = decode()
        except Exception as e:  # the rest of the record must come
            record["decode"] = {"error": f"{type(e).__name__}: {str(e)[:300]}"}
        print("decode", json.dumps(record["decode"]), flush=True)
    if "accuracy" in parts:
        rows = record.setdefault("accuracy", [])
        for name in given.suite.split(","):
            for dtype in ("bf16", "fp32"):
                guarded(rows, name, lambda n=name, d=dtype: check(n, d))  # type: ignore[misc]
    if "training" in parts:
        rows = record.setdefault("gradients", [])
        for name in suite.TRAINABLE:
            guarded(rows, name, lambda n=name: check_training(n))  # type: ignore[misc]
    wanted = {p for p, flag in (("inference", "inference"), ("training", "train-table")) if flag in parts}
    if wanted:
        record["table"] = table(given.models.split(","), wanted)
        record["bars"] = summary(record["table"])
    for key in ("accuracy", "gradients"):
        if key in record:
            print(f"{key}: {sum(r['right'] for r in record[key])} of {len(record[key])} right")
    if given.json:
        given.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

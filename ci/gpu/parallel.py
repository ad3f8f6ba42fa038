"""Check models sharded between two GPUs: correct results, times of eager, Inductor and ours, and a hundred calls without a hang.

    python -m ci.gpu.parallel [--ways decode,ddp] [--calls 100] [--limit 240] [--profile FOLDER] [--json out.json]

A Llama of eight layers (2048 wide, 16 heads): inference of one token per sequence (decode) and of whole sequences (prefill) and a
training step (train) with DTensor's tensor parallelism, and training steps with FSDP2 and DDP. Each way is a process group; all
compile concurrently, then they are timed one after another. A hang is ended after --limit seconds and reported. The table comes
last; exit code 1 if a way is wrong, hung or failed. `--profile` keeps a text for each way: kernels, and functions of the
host.
"""

from __future__ import annotations

import argparse
import cProfile
import fcntl
import io
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ci.gpu.profile_case import covered, on_device, table
from fusewright import report

WAYS = ("decode", "prefill", "train", "fsdp2", "ddp")
BACKENDS = ("eager", "inductor", "nvidia_triton")
ROWS = {"decode": (8, 1), "prefill": (4, 512), "train": (4, 512), "fsdp2": (4, 512), "ddp": (4, 512)}
"""Number of sequences and their length, per rank."""
BF16 = torch.bfloat16
RANKS, PROFILED, HOST_LINES = 2, 3, 30
WARM, CHUNK = 12, 10
NEAR = 0.03
"""Tolerance of a loss or of bf16 results, relative to eager's."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--calls", type=int, default=100, help="timed, of each backend")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a way counts as hung")
    parser.add_argument("--profile", type=Path, help="a folder for the texts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    ways = given.ways.split(",")
    if given.rank is not None:
        _rank(int(given.rank), ways[0], given.calls, Path(os.environ["MEETING"]))
        return 0
    rows = _run(ways, given.calls, given.limit, given.profile)
    if given.json:
        command = " ".join(["python -m ci.gpu.parallel", *sys.argv[1:]])
        given.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1))
    print(f"{'way':8s} " + " ".join(f"{b:>14s}" for b in BACKENDS) + "  over Inductor, over eager")
    for way in ways:
        print(_line(way, rows[way]))
    return int(any(row["outcome"] != "right" for row in rows.values()))


def _line(way: str, row: dict[str, Any]) -> str:
    if row["outcome"] != "right":
        return f"{way:8s} {row['outcome']}"
    eager, inductor, ours = (row["ms"][b] for b in BACKENDS)
    return f"{way:8s} {eager:11.2f} ms {inductor:11.2f} ms {ours:11.2f} ms  {inductor / ours:.2f}x, {eager / ours:.2f}x"


def _run(ways: Sequence[str], calls: int, limit: float, profiles: Path | None) -> dict[str, dict[str, Any]]:
    if profiles:
        profiles.mkdir(parents=True, exist_ok=True)
        os.environ["PROFILES"] = str(profiles.absolute())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        children = {(way, rank): _start(way, rank, calls, Path(folder), len(ways)) for way in ways for rank in range(RANKS)}
        end = time.monotonic() + limit
        for child in children.values():
            try:
                child.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
        for log in Path(folder).glob("*0.log") if profiles else ():
            shutil.copy(log, profiles or "")
        return {way: _outcome(way, [children[way, r].wait() for r in range(RANKS)], Path(folder)) for way in ways}


def _start(way: str, rank: int, calls: int, folder: Path, ways: int) -> subprocess.Popen[bytes]:
    caches = {n: f"{folder}/{way}{rank}{n}" for n in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSEWRIGHT_CACHE_DIR")}
    for cache in caches.values():
        Path(cache).mkdir(mode=0o700)
    env = {**os.environ, **caches, "MEETING": str(folder), "PEERS": str(ways * RANKS), "LOCAL_RANK": str(rank)}
    command = [sys.executable, "-m", "ci.gpu.parallel", "--ways", way, "--calls", str(calls), "--rank", str(rank)]
    with (folder / f"{way}{rank}.log").open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)


def _outcome(way: str, codes: list[int], folder: Path) -> dict[str, Any]:
    if any(codes):
        worst = min(range(RANKS), key=lambda r: codes[r])
        said = (folder / f"{way}{worst}.log").read_text(errors="replace")[-1500:]
        return {"outcome": "hung" if codes[worst] < 0 else "failed", "codes": codes, "words": said}
    row: dict[str, Any] = json.loads((folder / f"{way}.json").read_text())
    return row


def _rank(rank: int, way: str, calls: int, folder: Path) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/{way}", rank=rank, world_size=RANKS, device_id=device)
    torch.manual_seed(rank if way in ("fsdp2", "ddp") else 0)
    x = torch.randint(1000, ROWS[way], device=device)
    model = _divided(way, _llama(device))
    steps = {backend: _step(way, model, backend, x) for backend in BACKENDS}
    results = {}
    for backend, step in steps.items():
        with report.recording() as reports:
            for _ in range(WARM):
                results[backend] = step()
        print(backend, "compiled", time.monotonic(), *(f"\n{r.phase}: {r.replay}" for r in reports), flush=True)
    off = {b: abs(r - results["eager"]).max().item() / abs(results["eager"]).max().item() for b, r in results.items()}
    _await_others(folder, way, rank)
    ms = _timed(way, steps, calls, rank, folder)
    right = off[BACKENDS[-1]] <= NEAR
    if rank == 0:
        row = {"outcome": "right" if right else "wrong", "ms": ms, "off": off, "calls": calls}
        (folder / f"{way}.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def _llama(device: torch.device) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    seed = torch.random.get_rng_state()
    torch.manual_seed(0)  # replicas must start equal
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16}
    config = LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=8, **heads)
    model: nn.Module = LlamaForCausalLM(config).to(device)
    torch.random.set_rng_state(seed)
    return model


def _divided(way: str, model: Any) -> Any:
    mesh = init_device_mesh("cuda", (RANKS,))
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp2":
        policy = MixedPrecisionPolicy(param_dtype=BF16)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    how: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    how |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return parallelize_module(model.to(BF16), mesh, how)


def _step(way: str, model: nn.Module, backend: str, x: Tensor) -> Callable[[], Tensor]:
    """Return a call that gives logits, or the loss of a training step."""
    fast: Any = model if backend == "eager" else torch.compile(model, backend=backend)

    def infer() -> Tensor:
        with torch.no_grad():
            logits: Tensor = fast(input_ids=x, use_cache=False).logits
        return logits.float()

    def train() -> Tensor:
        with torch.autocast("cuda", BF16, enabled=way == "ddp"):
            loss: Tensor = fast(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return infer if way in ("decode", "prefill") else train


def _await_others(folder: Path, way: str, rank: int) -> None:
    """Wait until every rank of every way has compiled, because compilers would disturb the timing."""
    (folder / f"{way}{rank}.ready").touch()
    start = time.monotonic()
    while len(list(folder.glob("*.ready"))) < int(os.environ["PEERS"]) and time.monotonic() - start < 150:
        time.sleep(0.2)


def _timed(way: str, steps: dict[str, Callable[[], Tensor]], calls: int, rank: int, folder: Path) -> dict[str, float]:
    """Return the median milliseconds per call, timed in alternating chunks while no other group runs."""
    with (folder / "lock").open("w") as lock:
        if rank == 0:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / f"{way}.turn").touch()
        while not (folder / f"{way}.turn").exists():  # a barrier of NCCL's would spin on the GPU on which others are timed
            time.sleep(0.01)
        found: dict[str, list[float]] = {backend: [] for backend in steps}
        for _ in range(-(-calls // CHUNK)):
            for backend, step in steps.items():
                dist.barrier()
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CHUNK):
                    step()
                torch.cuda.synchronize()
                found[backend].append((time.perf_counter() - start) * 1000 / CHUNK)
        if folder_of_profiles := os.environ.get("PROFILES"):
            _profile(steps, rank, Path(folder_of_profiles) / f"{way}.txt")
        dist.barrier()
    return {backend: round(statistics.median(times), 3) for backend, times in found.items()}


def _profile(steps: dict[str, Callable[[], Tensor]], rank: int, text: Path) -> None:
    """Write what each backend's kernels and collectives take on rank 0, and the host's time until a step returns."""
    lines = []
    for backend, step in steps.items():
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(PROFILED):
                step()
            torch.cuda.synchronize()
        events = on_device(found, on_host=False)
        collectives = [e for e in events if e[0].startswith("nccl")]
        kernels = [e for e in events if not e[0].startswith("nccl")]
        either, of_kernels, of_collectives = (
            covered((start, end) for _, start, end in part) / PROFILED / 1e3 for part in (events, kernels, collectives)
        )
        lines.append(
            f"-- {backend}: busy {either:.1f} ms a step, with kernels {of_kernels:.1f}, with collectives {of_collectives:.1f}; "
            f"host {host * 1e3:.1f} ms, {len(events) / PROFILED:.0f} kernels"
        )
        lines += [*table(events, PROFILED), *_host(step)]
    if rank == 0:
        text.write_text("\n".join(lines) + "\n")


def _host(step: Callable[[], Tensor]) -> list[str]:
    """Return lines for the functions of the host that take longest."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(PROFILED):
        step()
    profiler.disable()
    torch.cuda.synchronize()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(HOST_LINES)
    return [f"   {line}" for line in text.getvalue().splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())

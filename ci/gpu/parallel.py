"""Check models sharded between two GPUs: correct results, times of eager, Inductor and ours, and a hundred calls without a hang.

    python -m ci.gpu.parallel [--ways decode,ddp] [--calls 100] [--limit 150] [--profile FOLDER] [--json out.json]

A Llama of eight layers (2048 wide, 16 heads): inference of one token per sequence (decode) and of whole sequences (prefill) and a
training step (train) with DTensor's tensor parallelism, and training steps with FSDP2 and DDP. Each backend of each way is a group
of two processes that builds, compiles and warms up the model by itself, as a user's would: in one process, each backend would move
the memory of the others. `--at-once` ways compile concurrently (three fit into 80 GB); then their groups are timed in short turns,
while all others are idle. A group that does not compile within `--limit` seconds, or takes more than a third of that for a turn, is
ended and reported, and the others go on.

The table has medians, and medians of the ratios round by round. Exit code 1 if a group hung or failed, or if ours is wrong.
`--profile` keeps a text for each way: kernels, and functions of the host. `--device cpu` tries the tool with gloo and tiny models.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ci.gpu import turns
from ci.gpu.profile_case import covered, on_device, table
from fusewright import report

WAYS = ("decode", "prefill", "train", "fsdp2", "ddp")
INFERENCE = ("decode", "prefill")
REPLICATED = ("fsdp2", "ddp")
"""Ways whose ranks have sequences of their own."""
OURS = {"cuda": "nvidia_triton", "cpu": "x86_onednn"}
BF16 = torch.bfloat16
RANKS, PROFILED, HOST_LINES = 2, 3, 30
COMPILED, WARM, FIRST, CHUNK = 3, 30, 2, 10
"""Calls of a group: until all is compiled, beside others; alone until its memory has settled; and in a turn, untimed and timed."""
TURNS = 3
"""A turn has one part in so many of the limit."""
NEAR = 0.03
"""Tolerance of a loss, of gradients' norms or of bf16 results, relative to eager's."""


@dataclass(frozen=True)
class Size:
    """The model's width, inner width, layers, heads and words, and the number of sequences and their length, per rank."""

    model: tuple[int, int, int, int, int]
    one_token: tuple[int, int]
    sequences: tuple[int, int]


SIZES = {
    "cuda": Size((2048, 5632, 8, 16, 32000), (8, 1), (4, 512)),
    "cpu": Size((64, 128, 2, 4, 1000), (2, 1), (2, 16)),
}


@dataclass(frozen=True)
class Job:
    """What a process does. `folder` is where the group meets and leaves its results."""

    way: str
    backend: str
    rank: int
    device: str
    folder: str

    @property
    def name(self) -> str:
        return f"{self.way}.{self.backend}"

    def results(self) -> Path:
        return Path(self.folder) / f"{self.name}.{self.rank}.pt"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--calls", type=int, default=100, help="timed, of each backend")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which a group that compiles counts as hung")
    parser.add_argument("--at-once", type=int, default=3, help="ways that compile at the same time")
    parser.add_argument("--profile", type=Path, help="a folder for the texts")
    parser.add_argument("--against", default="inductor", help="the backend beside ours and eager")
    parser.add_argument("--device", choices=OURS, default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.job is not None:
        turns.serve(partial(_begin, Job(**json.loads(given.job))))
        dist.destroy_process_group()
        return 0
    command = " ".join(["python -m ci.gpu.parallel", *(sys.argv[1:] if argv is None else argv)])
    print(f"{'way':8s} {'eager':>14s} {given.against:>14s} {OURS[given.device]:>14s}  over {given.against}, over eager", flush=True)
    rows: list[dict[str, Any]] = []
    for row in _rows(given):
        rows.append(row)
        print(_line(row, given.against), *(f"\n  {name}, {words}" for name, words in row.get("words", {}).items()), flush=True)
        if given.json:  # at once, for a run that is cut short
            given.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1))
    return int(any(row["outcome"] != "right" for row in rows))


def _line(row: Mapping[str, Any], against: str) -> str:
    ms = [f"{row[f'{b}_ms']:.2f} ms" if f"{b}_ms" in row else "-" for b in ("eager", against, "ours")]
    over = [f"{row[f'over_{b}']:.2f}x" if f"over_{b}" in row else "-" for b in (against, "eager")]
    told = "; ".join(filter(None, (row["outcome"], row["replay"])))
    return f"{row['way']:8s} {' '.join(f'{text:>14s}' for text in ms)}  {', '.join(over)}  {told}"


# ---------------------------------------------------------------- the parent


def _rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row of each way as soon as it is timed. No process is left behind."""
    ways, started = given.ways.split(","), list[turns.Group]()
    if given.profile:
        given.profile.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for k in range(0, len(ways), given.at_once):
                some = ways[k : k + given.at_once]
                groups = {way: _groups(way, given, Path(folder), len(some)) for way in some}
                beside = [g for of_way in groups.values() for g in of_way.values()]
                started += beside
                turns.hear(beside, given.limit)
                for way in some:
                    yield _row(way, groups[way], given, Path(folder))
        finally:
            turns.end([g for g in started if g.running()], 0)
            for log in Path(folder).glob("*.0.log") if given.profile else ():
                shutil.copy(log, given.profile)


def _groups(way: str, given: argparse.Namespace, folder: Path, at_once: int) -> dict[str, turns.Group]:
    """Start the groups of a way, one for each backend."""
    threads = max(1, (os.cpu_count() or 1) // (RANKS * at_once))
    groups = {}
    for backend in ("eager", given.against, OURS[given.device]):
        jobs = [Job(way, backend, rank, given.device, str(folder)) for rank in range(RANKS)]
        groups[backend] = turns.Group(jobs[0].name, [_command(job, threads) for job in jobs], folder)
    return groups


def _command(job: Job, threads: int) -> turns.Command:
    caches = turns.own_caches(job.folder, f"{job.name}.{job.rank}")
    few = {"OMP_NUM_THREADS": "1"} if job.device == "cpu" else {}
    own = {**caches, **few, "TORCHINDUCTOR_COMPILE_THREADS": str(threads), "LOCAL_RANK": str(job.rank)}
    return turns.Command([sys.executable, "-m", "ci.gpu.parallel", "--job", json.dumps(asdict(job))], {**os.environ, **own})


def _row(way: str, groups: Mapping[str, turns.Group], given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time the groups of a way, end them, and compare their results with eager's."""
    ours, turn = OURS[given.device], given.limit / TURNS
    ms = _timed(groups, given.calls, turn)
    if given.profile:
        texts = {b: answers[0] for b, g in groups.items() for answers in turns.ask([g], "profile", given.limit).values()}
        (given.profile / f"{way}.txt").write_text("".join(f"-- {b}: {text}\n" for b, text in texts.items()))
    told = {b: answers[0] for b, g in groups.items() for answers in turns.ask([g], "result", turn).values()}
    turns.end(list(groups.values()), turn)
    off = {b: _off(way, b, folder) for b in told if b != "eager" and "eager" in told}
    wrong = {b: g.outcome for b, g in groups.items() if g.outcome}
    if ours in off and not off[ours] <= NEAR:
        wrong.setdefault(ours, "wrong")
    named = {"ours" if b == ours else b: times for b, times in ms.items() if b in told}
    row: dict[str, Any] = {"way": way} | {f"{b}_ms": round(statistics.median(times), 3) for b, times in named.items()}
    if "ours" in named:
        row |= {f"over_{b}": round(turns.ratio(times, named["ours"]), 3) for b, times in named.items() if b != "ours"}
    row |= {"off": off, "calls_without_a_hang": given.calls, "replay": told.get(ours, "")}
    row["outcome"] = "; ".join(f"{b} {outcome}" for b, outcome in wrong.items()) or "right"
    if said := {b: g.words for b, g in groups.items() if g.words}:
        row["words"] = said
    return row


def _timed(groups: Mapping[str, turns.Group], calls: int, limit: float) -> dict[str, list[float]]:
    """Return milliseconds per call, of each backend and round. The slower rank counts, and every other round goes backwards."""
    for group in groups.values():
        turns.ask([group], "warm", limit)
    ms: dict[str, list[float]] = {backend: [] for backend in groups}
    for k in range(-(-calls // CHUNK)):
        for backend in list(groups)[:: -1 if k % 2 else 1]:
            for answers in turns.ask([groups[backend]], "turn", limit).values():
                ms[backend].append(max(answers))
    return ms


def _off(way: str, backend: str, folder: Path) -> float:
    """The largest distance of a result from eager's, relative to the largest element."""
    found = []
    for rank in range(RANKS):
        its, eager = (torch.load(folder / f"{way}.{b}.{rank}.pt") for b in (backend, "eager"))
        found += [abs(r - e).max() / abs(e).max() for r, e in zip(its, eager, strict=True)]
    return float(torch.stack(found).max())  # NaN if one is


# ---------------------------------------------------------------- a process of a group


def _begin(job: Job) -> dict[str, Callable[[], Any]]:
    """Compile the model; return what the parent may ask for."""
    cuda = job.device == "cuda"
    device = torch.device(f"cuda:{job.rank}" if cuda else "cpu")
    where: dict[str, Any] = {"init_method": f"file://{job.folder}/{job.name}.meeting", "rank": job.rank, "world_size": RANKS}
    if cuda:
        torch.cuda.set_device(device)
        where["device_id"] = device
    dist.init_process_group("nccl" if cuda else "gloo", **where)
    torch.manual_seed(job.rank if job.way in REPLICATED else 0)
    size = SIZES[job.device]
    x = torch.randint(1000, size.one_token if job.way == "decode" else size.sequences, device=device)
    model = _divided(job.way, _llama(device, size))
    if cuda:
        torch.cuda.empty_cache()  # what the whole model took, before others build theirs
    step, result = _step(job, model, x)
    wait = torch.cuda.synchronize if cuda else lambda: None
    with report.recording() as reports:
        _repeat(step, COMPILED, wait)
    print("compiled", time.monotonic(), flush=True)
    return {
        "warm": lambda: _repeat(step, WARM, wait),
        "turn": lambda: _turn(step, wait),
        "profile": lambda: _profile(step, wait, cuda),
        "result": lambda: _save(result, job, reports),
    }


def _repeat(step: Callable[[], Tensor], times: int, wait: Callable[[], None]) -> None:
    for _ in range(times):
        step()
    wait()


def _turn(step: Callable[[], Tensor], wait: Callable[[], None]) -> float:
    """Return milliseconds per call."""
    _repeat(step, FIRST, wait)
    dist.barrier()
    wait()
    start = time.perf_counter()
    _repeat(step, CHUNK, wait)
    return (time.perf_counter() - start) * 1000 / CHUNK


def _save(result: Callable[[], list[Tensor]], job: Job, reports: Sequence[report.GraphReport]) -> str:
    """Save the results of one more call, and return how many plans are replayed."""
    torch.save([r.float().cpu() for r in result()], job.results())
    plans = [r.replay for r in reports if not r.superseded]
    print("replay", *plans, sep="\n", flush=True)
    return f"{sum(p.startswith('replayed') for p in plans)} of {len(plans)} plans replayed"


def _llama(device: torch.device, size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    seed = torch.random.get_rng_state()
    torch.manual_seed(0)  # replicas must start equal
    width, inner, layers, heads, words = size.model
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        vocab_size=words,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).to(device)
    torch.random.set_rng_state(seed)
    return model


def _divided(way: str, model: Any) -> Any:
    mesh = init_device_mesh(model.device.type, (RANKS,))
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


def _step(job: Job, model: nn.Module, x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], list[Tensor]]]:
    """Return a call that gives logits, or the loss of a training step, and one for the results to compare: of a step also the norms
    of this rank's gradients."""
    fast: Any = model if job.backend == "eager" else torch.compile(model, backend=job.backend)

    def infer() -> Tensor:
        with torch.no_grad():
            logits: Tensor = fast(input_ids=x, use_cache=False).logits
        return logits.float()

    def gradients() -> Tensor:
        with torch.autocast(x.device.type, BF16, enabled=job.way == "ddp"):
            loss: Tensor = fast(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def train() -> Tensor:
        loss = gradients()
        model.zero_grad(set_to_none=True)
        return loss

    def trained() -> list[Tensor]:
        loss = gradients()
        norms = torch.stack([_norm(p) for p in model.parameters()])
        model.zero_grad(set_to_none=True)
        return [loss, norms]

    return (infer, lambda: [infer()]) if job.way in INFERENCE else (train, trained)


def _norm(p: nn.Parameter) -> Tensor:
    """The norm of this rank's part of a gradient."""
    assert p.grad is not None
    return (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).float().norm()


def _profile(step: Callable[[], Tensor], wait: Callable[[], None], cuda: bool) -> str:
    """Return what kernels and collectives take on this rank, and the host's time until a step returns."""
    step()
    wait()
    dist.barrier()
    start = time.perf_counter()
    step()
    host = time.perf_counter() - start
    wait()
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as found:
        _repeat(step, PROFILED, wait)
    events = on_device(found, on_host=False)
    collectives = [e for e in events if e[0].startswith("nccl")]
    kernels = [e for e in events if not e[0].startswith("nccl")]
    either, of_kernels, of_collectives = (
        covered((start, end) for _, start, end in part) / PROFILED / 1e3 for part in (events, kernels, collectives)
    )
    head = (
        f"busy {either:.1f} ms a step, with kernels {of_kernels:.1f}, with collectives {of_collectives:.1f}; "
        f"host {host * 1e3:.1f} ms, {len(events) / PROFILED:.0f} kernels"
    )
    return "\n".join([head, *table(events, PROFILED), *_host(step, wait)])


def _host(step: Callable[[], Tensor], wait: Callable[[], None]) -> list[str]:
    """Return lines for the functions of the host that take longest."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(PROFILED):
        step()
    profiler.disable()
    wait()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(HOST_LINES)
    return [f"   {line}" for line in text.getvalue().splitlines() if line.strip()]


if __name__ == "__main__":
    sys.exit(main())

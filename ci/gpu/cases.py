"""Regression cases of past GPU failures, for `ci/gpu/right.py`, which runs each in its own process.

A case raises if something is wrong, and otherwise returns a few words about what it saw.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusewright import _torch_compat as compat
from fusewright import report

OURS: Any = {"backend": "nvidia_triton", "options": {"fallback": "allow"}}
STRICT: Any = {"backend": "nvidia_triton", "options": {"fallback": "allow", "strict": True}}
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Runs `run` on `gpus` GPUs, in at most `seconds`. `line`: the entry in the list of past failures, for the record."""

    run: Callable[[], str]
    line: str
    seconds: float = 120
    gpus: int = 1


def close(ours: Tensor, eager: Tensor, times: float = 1.0) -> None:
    """Assert closeness up to the type's rounding error, relative to the largest element."""
    allowed = {torch.float32: 2e-3, BF16: 4e-2, torch.float16: 1e-2}[eager.dtype] * times
    assert ours.dtype == eager.dtype and ours.shape == eager.shape and ours.device == eager.device, (ours.dtype, ours.shape)
    error = ((ours.double() - eager.double()).abs().max() / eager.double().abs().max().clamp_min(1e-6)).item()
    assert error < allowed, f"the error is {error:.2e}"


def recordings(reports: list[report.GraphReport]) -> int:
    return sum(r.replay.startswith("replayed") for r in reports)


def qwen(layers: int = 12) -> tuple[nn.Module, Tensor]:
    """Return a model of Qwen2's geometry: 16 query heads, 2 key heads, 4 x 1024 tokens."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=2,
        vocab_size=32000, use_cache=False,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).cuda().to(BF16).eval()
    return model, torch.randint(0, 32000, (4, 1024), device="cuda")


# ---------------------------------------------------------------- recordings


@torch.no_grad()
def beside_graph_trees() -> str:
    """Inductor's graph trees, ours and eager alternate in one process from the first call on; the trees record again for another
    batch size long after our recording."""
    model, ids = qwen()
    eager = {n: model(ids[:n]).logits for n in (4, 2)}
    trees, ours = torch.compile(model, mode="reduce-overhead", dynamic=False), torch.compile(model, **OURS)
    with report.recording() as reports:
        for n in (4, 4, 4, 4, 4, 2, 2, 2, 4, 4, 4):
            torch.compiler.cudagraph_mark_step_begin()
            close(trees(ids[:n]).logits.clone(), eager[n])
            close(ours(ids).logits, eager[4])
            close(model(ids).logits, eager[4])
            torch.cuda.synchronize()
            if n == 2:
                torch.cuda.empty_cache()
    assert recordings(reports), "nothing was recorded, so nothing was tried"
    return f"{recordings(reports)} recordings, 11 rounds"


@torch.no_grad()
def workspaces_that_others_clear() -> str:
    """Between replays the libraries' workspaces are freed, and their memory is reused and overwritten by others."""
    model, ids = qwen(2)
    eager = model(ids).logits
    with report.recording() as reports:
        ours = torch.compile(model, **OURS)
        for _ in range(3):
            close(ours(ids).logits, eager)
        assert recordings(reports), "nothing was recorded, so nothing was tried"
        for k in range(6):
            compat.clear_workspaces()
            if k % 2:
                torch.cuda.empty_cache()
            others = [torch.full((1 << 21,), 7, dtype=torch.int32, device="cuda") for _ in range(64)]
            close(ours(ids).logits, eager)
            torch.cuda.synchronize()
            assert all(bool((t == 7).all()) for t in others), "a replay wrote into memory that is not its own"
            del others
    return "6 times"


def workspaces_in_training() -> str:
    """The same for recordings of forward and backward."""

    def grads(fn: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        fn(x).float().square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    layers = [nn.Linear(1024, 1024) if k % 2 == 0 else nn.GELU() for k in range(7)]
    model, x = nn.Sequential(*layers).cuda().to(BF16), torch.randn(512, 1024, device="cuda", dtype=BF16)
    eager = grads(model, model, x)
    with report.recording() as reports:
        ours = torch.compile(model, **OURS)
        for k in range(8):
            for got, want in zip(grads(ours, model, x), eager, strict=True):
                close(got, want)
            compat.clear_workspaces()
            if k % 2:
                torch.cuda.empty_cache()
            others = [torch.full((1 << 21,), 7, dtype=torch.int32, device="cuda") for _ in range(32)]
            torch.cuda.synchronize()
            del others
    assert recordings(reports), "nothing was recorded, so nothing was tried"
    return f"{recordings(reports)} recordings"


@torch.no_grad()
def streams_at_once() -> str:
    """Four threads, each with a stream, replay split-K products: no two of them may share a workspace."""
    torch.manual_seed(0)
    stacks = [nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))).cuda().to(BF16).eval() for _ in range(4)]
    inputs = [torch.randn(24, 4096, device="cuda", dtype=BF16) for _ in stacks]
    wanted = [m(x) for m, x in zip(stacks, inputs, strict=True)]
    torch.cuda.synchronize()
    fast = [torch.compile(m, **OURS) for m in stacks]
    failures: list[str] = []

    def work(k: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(200):
                    close(fast[k](inputs[k]), wanted[k])
        except Exception as e:
            failures.append(f"{type(e).__name__}: {e}")

    for k, x in enumerate(inputs):  # compiled one after another: concurrent compilation is a separate topic
        fast[k](x)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]
    return "4 streams, 200 calls each"


# ---------------------------------------------------------------- what is claimed and kept


@torch.no_grad()
def parallel_residuals() -> str:
    """Attention and MLP in parallel residuals, as in GPT-NeoX, GPT-J and Falcon, and a plain sum of three products."""
    import transformers

    torch.manual_seed(0)
    a, b, c = (nn.Linear(768, 3072, device="cuda", dtype=BF16) for _ in range(3))
    x, y = (torch.randn(2048, 768, device="cuda", dtype=BF16) for _ in range(2))
    for f in (lambda x, y: a(x) + b(y), lambda x, y: a(x) + b(y) + c(x), lambda x, y: F.gelu(a(x)) + F.gelu(b(y))):
        fast = torch.compile(f, **STRICT)
        for _ in range(3):
            close(fast(x, y), f(x, y))
    size = {"vocab_size": 4096, "use_cache": False}
    configs = [
        transformers.GPTNeoXConfig(
            hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, intermediate_size=4096, **size
        ),
        transformers.GPTJConfig(n_embd=1024, n_layer=2, n_head=16, rotary_dim=32, **size),
        transformers.FalconConfig(
            hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, parallel_attn=True, bias=False, alibi=False, **size
        ),
    ]  # fmt: skip
    for config in configs:
        model = transformers.AutoModelForCausalLM.from_config(config).cuda().to(BF16).eval()
        ids = torch.randint(0, 4096, (8, 512), device="cuda")
        eager, ours = model(ids).logits, torch.compile(model, **STRICT)
        for _ in range(3):
            close(ours(ids).logits, eager)
    return "3 sums, 3 models"


def names_of_symbols() -> str:
    """BART's training step with symbolic sizes; then equal kernels under other names, from the process and from disk."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BartConfig(
        d_model=256, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=512, decoder_ffn_dim=512, vocab_size=1024,
        encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    model = transformers.BartForConditionalGeneration(config).cuda().train()

    def step(fn: Any, ids: Tensor) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        fn(input_ids=ids, labels=ids).loss.backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    fast = torch.compile(model, dynamic=True, **STRICT)
    for batch, length in ((4, 64), (2, 96), (8, 33), (3, 128)):
        ids = torch.randint(0, 1024, (batch, length), device="cuda")
        for got, want in zip(step(fast, ids), step(model, ids), strict=True):
            close(got, want, 3)
    for f in (lambda x: F.softmax(x * 2, -1), lambda y, x: (y + 1, F.softmax(x * 2, -1))):
        for _ in range(2):  # the second time from disk
            torch.compiler.reset()
            ours = torch.compile(f, dynamic=True, **STRICT)
            for rows in (17, 64, 300):
                given = [torch.randn(rows, 5 + rows + k, device="cuda") for k in range(f.__code__.co_argcount)]
                for got, want in zip(_flat(ours(*given)), _flat(f(*given)), strict=True):
                    close(got, want)
    return "4 sizes of BART, 2 graphs of one kernel twice"


def _flat(x: Any) -> list[Tensor]:
    return list(x) if isinstance(x, tuple) else [x]


def random_numbers_of_a_first_run() -> str:
    """A restarted first run must draw the same random numbers again from the GPU's own generator."""
    with contextlib.suppress(RuntimeError):  # it may already be defined
        torch.library.define("fusewright_gpu::told_wrong", "(Tensor x) -> Tensor")
        torch.library.impl("fusewright_gpu::told_wrong", "CUDA", lambda x: x * 2)
        torch.library.register_fake("fusewright_gpu::told_wrong", lambda x: torch.empty_like(x, dtype=BF16))

    def f(x: Tensor) -> Tensor:
        dropped = F.dropout(x.sigmoid() + 1, 0.5, True)
        y = torch.ops.fusewright_gpu.told_wrong(dropped)
        return F.dropout(y.float().exp(), 0.5, True) + 1

    x = torch.randn(256, 256, device="cuda")
    fast = torch.compile(f, **OURS)
    with torch.no_grad():
        for seed in range(3):
            torch.manual_seed(seed)
            eager = f(x)
            state = torch.cuda.get_rng_state()
            torch.manual_seed(seed)
            got = fast(x)
            assert torch.equal(got == 1, eager == 1), "other elements are dropped than in eager"
            close(got, eager)
            assert torch.equal(torch.cuda.get_rng_state(), state), "the generator is elsewhere than after eager"
    return "3 seeds"


class Padded(nn.Module):
    """Attention with a mask of padding and dropout, whose seeds torch keeps on the host, or, in a recording, on the device."""

    def __init__(self, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.ins, self.outs = (nn.ModuleList(nn.Linear(width, n * width) for _ in range(depth)) for n in (3, 1))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        for norm, ins, out in zip(self.norms, self.ins, self.outs, strict=True):
            q, k, v = (y.unflatten(-1, (4, -1)).transpose(1, 2) for y in ins(norm(x)).chunk(3, -1))
            seen = F.scaled_dot_product_attention(q, k, v, kept[:, None, None, :], 0.2 if self.training else 0.0)
            x = x + out(seen.transpose(1, 2).flatten(2))
        return x


def dropout_of_attention_with_a_mask() -> str:
    """Plain and recorded forwards and backwards follow each other in every order; so do those that eager is compared in, and a
    capture by the user. The same is dropped as in eager. Torch chooses another kernel for bf16 than for fp32."""
    return ", ".join(_dropped(kind) for kind in (torch.float32, BF16))


def _dropped(kind: torch.dtype) -> str:
    torch.manual_seed(0)
    model, x = Padded().cuda(), torch.randn(8, 96, 256, device="cuda")
    kept = torch.arange(96, device="cuda") < torch.arange(24, 96, 9, device="cuda")[:, None]
    times = 1 if kind == torch.float32 else 10  # of gradients in fp32

    def loss(fn: Any) -> Tensor:
        with torch.autocast("cuda", kind, enabled=kind != torch.float32):
            return fn(x, kept).float().square().mean()

    def grads(fn: Any, seeds: Sequence[int]) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        losses = []
        for seed in seeds:
            torch.manual_seed(seed)
            losses.append(loss(fn))
        torch.stack(losses).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def compare(got: list[Tensor], want: list[Tensor]) -> None:
        for a, b in zip(got, want, strict=True):
            close(a, b, times)

    torch.compiler.reset()
    with report.recording() as reports:
        ours = torch.compile(model, **OURS)
        for _ in range(4):
            loss(ours)  # forward is recorded before there is a backward
        for seeds in ((1,), (2,), (3, 4), (5,), (6, 7, 8), *[(9 + n,) for n in range(60)]):
            compare(grads(ours, seeds), grads(model, seeds))
    assert recordings(reports) >= 2, [r.replay for r in reports]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            grads(ours, (1,))
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss(ours).backward()
    torch.manual_seed(3)
    graph.replay()
    compare([p.grad.clone() for p in model.parameters() if p.grad is not None], grads(model, (3,)))
    with torch.no_grad():  # predictions of several draws
        first, second = (ours(x, kept) for _ in range(2))
        assert not torch.equal(first, second), "the same is dropped in each call"
    return f"{kind}: 65 steps, {recordings(reports)} recordings, a capture"


class Checkpointed(nn.Module):
    """Layers side by side, each a checkpoint. What is dropped is zero, and a bias's gradient counts the rest."""

    def __init__(self, width: int = 64, layers: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Dropout(0.5)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2)  # from the device's own generator
        return torch.stack([checkpoint(f, x, use_reentrant=False) for f in self.layers])


def dropout_in_checkpoints() -> str:
    """Backward drops what forward did in every order of forwards and backwards, recorded or not. Gradients and the device's
    generator are those of the plain plans."""
    (ours, state, made), (plain, plain_state, _) = (_checkpointed(graphs) for graphs in (True, False))
    assert made >= 2, "nothing was recorded, so nothing was tried"
    for got, want in zip(ours, plain, strict=True):
        close(got, want)
    assert torch.equal(state, plain_state), "the generator is elsewhere than without recordings"
    return f"{made} recordings, {len(ours)} rounds"


def _checkpointed(graphs: bool) -> tuple[list[Tensor], Tensor, int]:
    """Gradients of weights in each round, the generator's state at the end, and the number of recordings."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x, found = Checkpointed().cuda(), torch.randn(32, 64, device="cuda"), list[Tensor]()
    options = {**OURS["options"], "graphs": graphs, "never_slower": False}  # eager's steps would prove nothing
    orders: list[tuple[int, ...]] = [(0,)] * 6 + [(0, 1), (1, 0), (0,), (2, 0, 1), (0,), (0,)]
    with report.recording() as reports:
        fast = torch.compile(model, backend=OURS["backend"], options=options)
        for order in orders:
            results = [fast(x + k) for k in range(len(order))]
            wanted = torch.stack([(y != 0).sum(1) for y in results]).sum(0) * 2.0
            model.zero_grad(set_to_none=True)
            for k in order:
                results[k].sum().backward()
            del results
            biases, weights = ([p.grad for p in model.parameters() if p.grad is not None and p.dim() == n] for n in (1, 2))
            close(torch.stack(biases), wanted)
            found.append(torch.stack(weights))
    return found, torch.cuda.get_rng_state(), recordings(reports)


# ---------------------------------------------------------------- several GPUs


def another_gpu_than_the_current_one() -> str:
    """A model on cuda:1 while GPU 0 is current: recorded inference, decoding, training, and two devices in turn."""
    assert torch.cuda.current_device() == 0
    model, ids = qwen(2)
    one, there = model.to("cuda:1"), ids.to("cuda:1")
    with torch.no_grad(), report.recording() as reports:
        eager, fast = one(there).logits, torch.compile(one, **OURS)
        for _ in range(4):
            close(fast(there).logits, eager)
        torch.cuda.synchronize("cuda:1")
    inference = recordings(reports)
    layers = [nn.LayerNorm(512), nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512), nn.LayerNorm(512)]
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        torch.manual_seed(0)
        trained = nn.Sequential(*layers).to(device)
        x, compiled = torch.randn(64, 512, device=device), torch.compile(trained, **OURS)
        for k in range(4):
            found = []
            for fn in (compiled, trained):
                trained.zero_grad(set_to_none=True)
                fn(x + k).square().mean().backward()
                found.append([p.grad.clone() for p in trained.parameters() if p.grad is not None])
            for got, want in zip(*found, strict=True):
                close(got, want)
        with torch.no_grad():
            for rows in (1, 3, 64):
                close(compiled(x[:rows]), trained(x[:rows]))
    assert torch.cuda.current_device() == 0
    return f"inference on cuda:1 with {inference} recordings, training on both"


class Block(nn.Module):
    """A part of a transformer: a norm, and an MLP sharded between GPUs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


def _rank(rank: int, store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    os.environ.update({"LOCAL_RANK": str(rank), "FUSEWRIGHT_CACHE_DIR": f"{Path(store).parent}/cache{rank}"})
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    torch.distributed.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=device)
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Block(1024) for _ in range(4))).to(device, BF16).eval(), torch.randn(512, 1024, device=device)
    x = x.to(BF16)
    with torch.no_grad():
        expected = model(x)
    how = {f"{k}.{n}": c() for k in range(4) for n, c in (("up", ColwiseParallel), ("down", RowwiseParallel))}
    divided = parallelize_module(model, init_device_mesh("cuda", (2,)), how)  # type: ignore[arg-type]
    with torch.no_grad(), report.recording() as reports:
        fast = torch.compile(divided, **STRICT)
        for k in range(20):
            time.sleep(0.05 * ((k + rank) % 2))
            close(fast(x), expected)
    assert recordings(reports), "the graph, which communicates, was not recorded"
    for k in range(4):
        time.sleep(0.05 * ((k + rank) % 2))
        divided.zero_grad(set_to_none=True)
        fast(x).float().square().mean().backward()
    torch.cuda.synchronize()
    torch.distributed.destroy_process_group()


def tensor_parallel() -> str:
    """Recorded inference and training of a sharded model finish although the two ranks never reach a call at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (f"{folder}/store",), nprocs=2)
    return "20 calls and 4 steps"


CASES: Mapping[str, Case] = {
    "beside_graph_trees": Case(beside_graph_trees, "8", 240),
    "workspaces_that_others_clear": Case(workspaces_that_others_clear, "8"),
    "workspaces_in_training": Case(workspaces_in_training, "8"),
    "streams_at_once": Case(streams_at_once, "8"),
    "parallel_residuals": Case(parallel_residuals, "9", 180),
    "names_of_symbols": Case(names_of_symbols, "10", 180),
    "random_numbers_of_a_first_run": Case(random_numbers_of_a_first_run, "6"),
    "dropout_of_attention_with_a_mask": Case(dropout_of_attention_with_a_mask, "14", 180),
    "dropout_in_checkpoints": Case(dropout_in_checkpoints, "14", 180),
    "another_gpu_than_the_current_one": Case(another_gpu_than_the_current_one, "6", 180, 2),
    "tensor_parallel": Case(tensor_parallel, "12", 180, 2),
}

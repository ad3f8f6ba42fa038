"""Time models whose lengths differ from call to call: each length comes once, as in a generated text. Prints rows as it goes.

    python -m ci.gpu.lengths [--cases cache,padded,context,steps] [--backends eager,nvidia_triton,inductor] [--json out.json]

- `cache`: a token of a Llama whose cache is concatenated (transformers' `DynamicCache`, which `generate` uses by default);
- `padded`: the same for four sequences with a mask;
- `context`: a token of a decoder without a cache, which reads its whole context;
- `steps`: steps of training with AdamW on batches of any length.

Each backend of each case is a process of its own, since libraries keep what they plan for a length. ms are medians of the last
calls; results are compared with eager's. `--device cpu` tries the tool with tiny models. Exit code 1 if a backend failed or is
wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

OFF = 0.08
"""The most that logits or losses may be off, in parts of eager's norm: bf16 with other orders of sums in sixteen layers."""
COUNTED = 25
"""Calls of which the median is taken: the last."""


class Decoder(nn.Module):
    """A GPT without a cache, like nanoGPT's."""

    def __init__(self, width: int, layers: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.heads, self.tokens, self.positions = heads, nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.layers = nn.ModuleList(
            nn.ModuleList([
                nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width),
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width),
            ])
            for _ in range(layers)
        )  # fmt: skip
        self.norm, self.logits = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            before, qkv, out, after, up, down = layer.children()
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv(before(x)).chunk(3, -1))
            x = x + out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + down(F.gelu(up(after(x))))
        found: Tensor = self.logits(self.norm(x)[:, [-1]])
        return found


def compiled(fn: Callable[..., Any], backend: str, **how: Any) -> Callable[..., Any]:
    """Return `fn` as a backend runs it; "eager" is eager."""
    if backend == "eager":
        return fn
    if backend not in ("inductor", "aot_eager"):
        how["options"] = {"cache": False, "fallback": "allow"}
    run: Callable[..., Any] = torch.compile(fn, backend=backend, **how)
    return run


def of_cache(backend: str, device: str, small: bool, sequences: int = 1, layers: int = 16) -> Iterator[Tensor]:
    """Yield the logits of each token; with several sequences, two of them are padded."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    width = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2} if small else {
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8
    }  # fmt: skip
    config = LlamaConfig(**width, num_hidden_layers=2 if small else layers, vocab_size=32000, max_position_embeddings=4096)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    run, past = compiled(model.forward, backend), DynamicCache(config=config)
    ids = torch.randint(0, 32000, (sequences, 200), device=device)
    mask = torch.ones(sequences, 200, dtype=torch.long, device=device) if sequences > 1 else None
    if mask is not None:
        mask[0, :57] = mask[2, :9] = 0
    for k in range(10_000):
        given = {} if mask is None else {"attention_mask": mask}
        with torch.no_grad():
            out = run(input_ids=ids, past_key_values=past, use_cache=True, **given)
        past, ids = out.past_key_values, (ids[:, -1:] * 31 + k) % 32000
        mask = None if mask is None else torch.cat([mask, mask[:, -1:]], 1)
        yield out.logits[:, -1]


def of_context(backend: str, device: str, small: bool) -> Iterator[Tensor]:
    """Yield the logits of each token."""
    with torch.device(device):
        model = Decoder(*((64, 2, 4, 300) if small else (768, 12, 12, 50304)))
    run, ids = compiled(model.to(torch.bfloat16).eval(), backend), torch.randint(0, 300, (4, 100), device=device)
    for k in range(10_000):
        with torch.no_grad():
            yield run(ids)[:, -1]
        ids = torch.cat([ids, (ids[:, -1:] * 31 + k) % 300], 1)


def of_steps(backend: str, device: str, small: bool) -> Iterator[Tensor]:
    """Yield the loss of each step."""
    with torch.device(device):
        model = Decoder(*((64, 2, 4, 300) if small else (768, 6, 12, 8000)))
    steps = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return model(ids).float().logsumexp(-1).mean()

    run = compiled(loss, backend, dynamic=True)
    for k in range(10_000):
        found = run(torch.randint(0, 300, (8, 100 + k * 37 % 211), device=device))
        found.backward()
        steps.step()
        steps.zero_grad(set_to_none=True)
        yield found.detach()[None]


CASES: dict[str, Callable[[str, str, bool], Iterator[Tensor]]] = {
    "cache": of_cache,
    "padded": lambda backend, device, small: of_cache(backend, device, small, 4, 8),
    "context": of_context,
    "steps": of_steps,
}


def measure(case: str, backend: str, device: str, calls: int, to: Path) -> None:
    """Run a case; write its times and results."""
    torch.manual_seed(0)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    results, times = [], []
    run, started = CASES[case](backend, device, device == "cpu"), time.perf_counter()
    for _ in range(calls):
        wait()
        before = time.perf_counter()
        results.append(next(run).float())
        wait()
        times.append(time.perf_counter() - before)
    took = time.perf_counter() - started
    torch.save({"ms": statistics.median(times[-COUNTED:]) * 1e3, "all_s": took, "results": [r.cpu() for r in results]}, to)


def row(case: str, backend: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the figures of a case by one backend, from a process of its own."""
    to = folder / f"{case}-{backend}.pt"
    how = ["--one", case, backend, str(to), "--device", given.device, "--calls", str(given.calls)]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "ci.gpu.lengths", *how], timeout=given.limit, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return {"case": case, "backend": backend, "outcome": f"not done in {given.limit} s"}
    if ended.returncode:
        return {"case": case, "backend": backend, "outcome": (ended.stderr.strip().splitlines() or ["failed"])[-1][:200]}
    mine, eager = (torch.load(folder / f"{case}-{b}.pt") for b in (backend, "eager"))
    off = max(float((a - b).norm() / b.norm()) for a, b in zip(mine["results"], eager["results"], strict=True))
    found = {"case": case, "backend": backend, "ms": round(mine["ms"], 2), "all_s": round(mine["all_s"], 1), "off": round(off, 4)}
    return {**found, "outcome": "right" if off <= OFF else "wrong"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.lengths", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--cases", default=",".join(CASES), help="what to time, with commas")
    parser.add_argument("--backends", default="eager,nvidia_triton,inductor", help="eager is always run")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--limit", type=float, default=150, help="seconds for each process")
    parser.add_argument("--json", type=Path, help="where to keep the rows")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one is not None:
        measure(given.one[0], given.one[1], given.device, given.calls, Path(given.one[2]))
        return 0
    if unknown := set(given.cases.split(",")) - CASES.keys():
        parser.error(f"no case: {', '.join(sorted(unknown))}; known are {', '.join(CASES)}")
    backends = dict.fromkeys(["eager", *given.backends.split(",")])
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for case, backend in itertools.product(given.cases.split(","), backends):
            rows.append(r := row(case, backend, given, Path(folder)))
            print(f"{case:10s} {backend:16s} {r.get('ms', ''):>8} ms {r.get('all_s', ''):>7} s in all  {r['outcome']}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")
    return int(any(r["outcome"] != "right" for r in rows))


if __name__ == "__main__":
    sys.exit(main())

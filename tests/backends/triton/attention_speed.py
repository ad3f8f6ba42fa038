"""Attention on this GPU: `python -m tests.backends.triton.attention_speed [PART ...] [--json FILE]`.

Parts: shapes, batch1, batch4; all by default.

Device time of torch's kernels and ours at shapes of models (replayed in a CUDA graph, so that launches do not count), and
the image encoder of Segment Anything (ViT-B, 1024 x 1024, bf16) beside eager and Inductor, with errors against fp64.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fusewright_triton.kernels import attention_ops

REPLAYS, CALLS = 9, 10
PARTS = ("shapes", "batch1", "batch4")
TORCHS = {
    "torch": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """`sizes` are batch, heads, queries, keys, dim; `mask` is the shape of a mask, `boolean` or added."""

    sizes: tuple[int, int, int, int, int]
    causal: bool = False
    kv_heads: int = 0
    mask: tuple[int, ...] = ()
    boolean: bool = False
    dtype: torch.dtype = torch.bfloat16


SHAPES = {
    "BERT": Shape((16, 12, 512, 512, 64)),
    "BERT, padded": Shape((16, 12, 512, 512, 64), mask=(16, 1, 1, 512), boolean=True),
    "ViT": Shape((64, 12, 197, 197, 64)),
    "GPT-2": Shape((16, 12, 512, 512, 64), causal=True),
    "Llama": Shape((4, 32, 1024, 1024, 64), causal=True, kv_heads=8),
    "Whisper": Shape((8, 6, 1500, 1500, 64)),
    "T5": Shape((8, 8, 512, 512, 64), mask=(1, 8, 512, 512)),
    "Swin": Shape((256, 4, 49, 49, 32), mask=(256, 4, 49, 49)),
    "a mask for each head": Shape((25, 12, 196, 196, 64), mask=(25, 12, 196, 196)),
    "128 wide, masked": Shape((4, 16, 1024, 1024, 128), mask=(4, 1, 1, 1024), boolean=True),
    "fp32, a bias": Shape((4, 12, 512, 512, 64), mask=(4, 12, 512, 512), dtype=torch.float32),
}


def microseconds(f: Callable[[], object]) -> float:
    """Return the device time of one call."""
    f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            f()
    return 1e3 * milliseconds(graph.replay) / CALLS


def milliseconds(f: Callable[[], object]) -> float:
    """Return the median time of a call, measured by events."""
    times = []
    for _ in range(3):
        f()
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        f()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[REPLAYS // 2]


def measured(s: Shape) -> dict[str, Any]:
    """Return microseconds for each kernel that supports the shape."""
    batch, heads, queries, keys, dim = s.sizes
    sizes = ((queries, heads), (keys, s.kv_heads or heads), (keys, s.kv_heads or heads))
    q, k, v = (torch.randn(batch, n, h, dim, device="cuda").to(s.dtype).transpose(1, 2) for n, h in sizes)
    mask = None
    if s.mask:
        mask = torch.randn(s.mask, device="cuda").to(s.dtype)
        mask = (mask > -1 if s.boolean else mask).expand(batch, heads, queries, keys)
    row: dict[str, Any] = {}
    for name, which in TORCHS.items():
        call = partial(sdpa, q, k, v, mask, is_causal=s.causal, enable_gqa=bool(s.kv_heads))
        try:
            if which is None:
                row[name] = microseconds(call)
            else:
                with sdpa_kernel(which):
                    row[name] = microseconds(call)
        except RuntimeError:  # this kernel does not support the shape
            torch.cuda.synchronize()
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    row["ours"] = microseconds(lambda: attention_ops.attention(q, k, v, mask, None, s.causal, None, True, q.stride(), arch))
    return row


def encoder(implementation: str, layers: int = 12) -> Any:
    from transformers import SamVisionConfig
    from transformers.models.sam.modeling_sam import SamVisionEncoder

    config = SamVisionConfig(num_hidden_layers=layers, initializer_range=0.02)
    config._attn_implementation = implementation
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = SamVisionEncoder(config).eval()
    for name, p in module.named_parameters():
        if "pos" in name:
            torch.nn.init.normal_(p, std=0.02)
    return module.bfloat16()


def models(batch: int) -> list[dict[str, Any]]:
    """Return a row for each form of the encoder: eager, Inductor and ours in ms, first calls in s, and errors for batch 1."""
    ours: dict[str, Any] = {"backend": "nvidia_triton", "options": {"cache": False, "fallback": "allow"}}
    x = torch.randn(batch, 3, 1024, 1024, device="cuda").bfloat16()
    rows = []
    for form in ("sdpa", "eager"):
        module = encoder(form)
        row: dict[str, Any] = {"batch": batch, "form": form, "eager": milliseconds(partial(module, x))}
        results = {"eager": module(x).last_hidden_state}
        for name, how in (("inductor", {}), ("ours", ours)):
            torch.compiler.reset()
            compiled = torch.compile(module, **how)
            start = time.perf_counter()
            results[name] = compiled(x).last_hidden_state.clone()
            torch.cuda.synchronize()
            row[f"{name}_first"] = time.perf_counter() - start
            row[name] = milliseconds(partial(compiled, x))
        if batch == 1:
            wide = copy.deepcopy(module).double()(x.double()).last_hidden_state
            row |= {f"{name}_error": float((y - wide).abs().max()) for name, y in results.items()}
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("parts", nargs="*", help=", ".join(PARTS))
    p.add_argument("--json")
    given = p.parse_args()
    parts = given.parts or PARTS
    record: dict[str, Any] = {"version": 1, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "us": {}}
    record["models"] = []
    with torch.no_grad():
        for name, shape in SHAPES.items() if "shapes" in parts else ():
            row = measured(shape)
            record["us"][name] = {**{k: str(v) for k, v in asdict(shape).items()}, **row}
            print(f"{name:22}", " ".join(f"{k} {v:.1f}" for k, v in row.items()), flush=True)
        for batch in (1, 4):
            if f"batch{batch}" in parts:
                record["models"] += models(batch)
    if given.json:
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Run eager's counterparts of the kernels that `kernels.py count` counts, in an emulated Python with only torch. After two warm-up
calls, the third is enclosed in two marks for `count.c`. Arguments: names of cases (default: all). Prints their names."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

import torch
from torch.nn import functional as F

MARK = 1000
torch.manual_seed(0)
torch.set_num_threads(1)
system_call = ctypes.CDLL(None).syscall


def cases(dtype: torch.dtype) -> dict[str, Callable[[], torch.Tensor]]:
    """Return calls by name, on tensors of one dtype."""
    x, y = torch.randn(64, 768).to(dtype), torch.randn(64, 768).to(dtype)
    w, b = torch.randn(768).to(dtype), torch.randn(768).to(dtype)
    row, weight = torch.randn(1, 4096).to(dtype), torch.randn(4096, 4096).to(dtype)
    int8, scale = torch.randint(-127, 127, (4096, 4096), dtype=torch.int8), torch.rand(4096).to(dtype)

    def rms_norm() -> torch.Tensor:
        wide = x.float()
        return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)

    found = {
        "gelu": lambda: F.gelu(x),
        "bias, gelu": lambda: F.gelu(x + b),
        "layer norm": lambda: F.layer_norm(x, (768,), w, b),
        "residual, layer norm": lambda: F.layer_norm(x + y, (768,), w, b),
        "rms norm": rms_norm,
        "softmax": lambda: F.softmax(x, -1),
        "scale, mask, softmax": lambda: F.softmax(x * 0.125 + y, -1),
        "decode": lambda: F.linear(row, weight),
    }
    if dtype == torch.bfloat16:
        found["decode, int8 weights"] = lambda: torch._weight_int8pack_mm(row, int8, scale)
    return found


for dtype in (torch.float32, torch.bfloat16):
    for name, call in cases(dtype).items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        for _ in range(2):
            call()
        system_call(MARK)
        call()
        system_call(MARK)
        print(f"{name}|{dtype}", flush=True)

"""What tests need of this machine beyond a backend's probe, as marks whose reasons name what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

needs_bf16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN takes no bf16 on this CPU; runs on x86 with AVX-512 or AVX-NE-CONVERT, and on Arm with BF16",
)
"""Of tests that run oneDNN's own calls in bf16, or convolutions of bf16 volumes for a simulated GPU: without it their results
lie in planes. Eager's and our kernels compute bf16 on any CPU."""

FLOATS: tuple[Any, ...] = (torch.float32, pytest.param(torch.bfloat16, marks=needs_bf16))
"""The types that oneDNN multiplies, as parameters."""

"""Products and convolutions of fp32 tensors that multiply in bf16 and accumulate in fp32 (`bfmmla`), with fp32 inputs and results.

oneDNN takes the precision of fp32 products from a process-wide setting of torch (`torch.backends.mkldnn.matmul.fp32_precision`),
which the operators here set while they run. A product that another thread starts meanwhile is also computed in bf16; the setting
is restored afterwards. oneDNN then rounds and reorders the weight at every call, however it was packed, so products with constant
weights may use our own kernel instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fusewright_cpu.kernels.arm import bf16_linear

NAMESPACE = "fusewright_acl"
LINEAR = f"{NAMESPACE}::linear_bf16.default"
PACK = f"{NAMESPACE}::pack_bf16.default"
BMM = f"{NAMESPACE}::bmm_bf16.default"
SDPA = f"{NAMESPACE}::sdpa_bf16.default"
CONV = f"{NAMESPACE}::conv_bf16.default"

_SETTINGS: tuple[Any, ...] = tuple(getattr(torch.backends.mkldnn, name) for name in ("matmul", "conv"))
_lock = threading.Lock()
_inside = 0
_before: list[str] = []


@contextmanager
def bf16_products() -> Iterator[None]:
    """Let oneDNN multiply fp32 in bf16. The last thread to leave restores the setting that the first one found."""
    global _inside
    with _lock:
        if not _inside:
            _before[:] = [s.fp32_precision for s in _SETTINGS]
            _set(["bf16"] * len(_SETTINGS))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _set(_before)


def _set(values: Sequence[str]) -> None:
    for setting, value in zip(_SETTINGS, values, strict=True):
        setting.fp32_precision = value


def linear_bf16(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x[..., k] @ weight[n, k].T in fp32, row-major."""
    with bf16_products():
        return torch.mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])


def pack_bf16(weight: torch.Tensor) -> torch.Tensor:
    """Pack a weight [n, k] for our own kernel."""
    return bf16_linear.packed(weight).contiguous()


def sdpa_bf16(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Compute attention of fp32 tensors with both products in bf16."""
    with bf16_products():
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=scale)


def bmm_bf16(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x[b, m, k] @ y[b, k, n] in fp32, row-major."""
    with bf16_products():
        return torch.bmm(x, y)


def conv_bf16(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Sequence[int], stride: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> torch.Tensor:  # fmt: skip
    """Convolve channels-last images with a packed weight (`mkldnn::_reorder_convolution_weight`)."""
    with bf16_products():
        return torch.ops.mkldnn._convolution_pointwise(x, weight, bias, padding, stride, dilation, groups, "none", [], "")


_OPERATORS: Mapping[Callable[..., torch.Tensor], str] = {
    linear_bf16: "(Tensor x, Tensor weight) -> Tensor",
    pack_bf16: "(Tensor weight) -> Tensor",
    bmm_bf16: "(Tensor x, Tensor y) -> Tensor",
    sdpa_bf16: "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale) -> Tensor",
    conv_bf16: "(Tensor x, Tensor weight, Tensor? bias, int[] padding, int[] stride, int[] dilation, int groups) -> Tensor",
}
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _function, _schema in _OPERATORS.items():
    _library.define(f"{_function.__name__}{_schema}")
    _library.impl(_function.__name__, _function, "CompositeExplicitAutograd")  # packed weights do not dispatch as CPU tensors

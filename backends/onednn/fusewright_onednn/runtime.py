"""Attention through oneDNN Graph, as a torch operator that a plan can name: `fusewright_onednn::attention`.

oneDNN Graph runs softmax(q k^T * scale + mask) v as one partition. Torch reaches it only through
TorchScript, so each new
signature (shapes, strides, dtype, threads) is scripted once. Figures: docs/studies/onednn.md.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable

import torch

from fusewright.toolkit.torchscript import onednn_fusion

NAMESPACE = "fusewright_onednn"
ATTENTION = f"{NAMESPACE}::attention.default"

LIMIT = 128
"""Signatures kept. A caller whose shapes keep changing costs no more memory than this many compiled
partitions."""

_WARM_UP_RUNS = 3
"""TorchScript profiles the first run, fuses in the second; the third shows that the fused graph runs."""

_SOURCE = """
def attention(q: Tensor, k: Tensor, v: Tensor):
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * {scale!r}, -1), v)

def attention_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor):
    return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * {scale!r} + mask, -1), v)
"""


def graph_available() -> bool:
    """Whether torch has the oneDNN Graph fuser for TorchScript."""
    return hasattr(torch.jit, "enable_onednn_fusion") and torch.backends.mkldnn.is_available()


class _Partition:
    """The script of one signature: TorchScript's guards then always hold, and its fallback is never taken."""

    def __init__(self, scale: float, masked: bool) -> None:
        unit = torch.jit.CompilationUnit(_SOURCE.format(scale=scale))
        self._script: Callable[..., torch.Tensor] = unit.attention_masked if masked else unit.attention
        self._fused = False
        self._lock = threading.Lock()

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        if not self._fused:
            with self._lock:
                self._fuse(tensors)
        return self._script(*tensors)

    def _fuse(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Run until TorchScript has fused. The fuser is on for these runs only: it is a setting of the
        process."""
        with onednn_fusion():
            for _ in range(_WARM_UP_RUNS):
                self._script(*tensors)
        self._fused = True


@functools.lru_cache(LIMIT)
def _partition(
    signature: tuple[object, ...], dtype: torch.dtype, scale: float, masked: bool, threads: int
) -> _Partition:
    """The partition for tensors of this signature. It is compiled for a number of threads, so that is part
    of the key."""
    return _Partition(scale, masked)


def _run(tensors: tuple[torch.Tensor, ...], scale: float) -> torch.Tensor:
    signature = tuple((tuple(t.shape), t.stride()) for t in tensors)
    partition = _partition(signature, tensors[0].dtype, scale, len(tensors) == 4, torch.get_num_threads())
    with torch.no_grad():
        return partition(*tensors)


@functools.lru_cache(LIMIT)
def _causal(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """[1, 1, rows, columns]: 0 on and below the diagonal, -inf above."""
    return torch.full((1, 1, rows, columns), -math.inf, dtype=dtype).triu(1)


def _additive(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(mask.logical_not(), -math.inf)
    mask = mask.float()
    return mask.reshape((1,) * (like.dim() - mask.dim()) + tuple(mask.shape))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """What `scaled_dot_product_attention` without dropout gives, strides included.

    query [B, H, L, D], key [B, H, S, D], value [B, H, S, D], fp32 or bf16; mask is boolean or added, and
    broadcasts to
    [B, H, L, S]. bf16 computes in fp32: oneDNN's bf16 partition rounds the scores and is up to 4.5 times
    less exact than
    torch's own kernel. Rows without a single allowed key give 0, as in torch's kernel, so a mask that has
    such a row
    goes to that kernel.
    """
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    extra: tuple[torch.Tensor, ...] = ()
    if is_causal:
        extra = (_causal(query.shape[-2], key.shape[-2], torch.float32),)
    elif mask is not None:
        added = _additive(mask, query)
        if bool((added.amax(-1) == -math.inf).any()):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
        extra = (added,)
    out = _run((query.float(), key.float(), value.float(), *extra), factor)
    result = torch.empty_like(query)  # torch's kernel lays its result out like the query, and views of it rely on that
    return out if (out.dtype, out.stride()) == (result.dtype, result.stride()) else result.copy_(out)


def _meta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    return torch.empty_like(query)


_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale) -> Tensor"
)
_library.impl("attention", attention, "CPU")
_library.impl("attention", _meta, "Meta")

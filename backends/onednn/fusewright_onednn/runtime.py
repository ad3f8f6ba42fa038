"""Attention through oneDNN, as torch operators that a plan can name.

`fusewright_onednn::attention`: oneDNN Graph runs softmax(q k^T * scale + mask) v as one partition. Torch reaches it
only through TorchScript, so each new signature (shapes, strides, dtype, threads) is scripted once.
`fusewright_onednn::attention_blocked`: oneDNN products over blocks of rows whose scores stay in cache, for long
sequences. Figures: docs/studies/onednn.md.
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
ATTENTION_BLOCKED = f"{NAMESPACE}::attention_blocked.default"

BLOCK_SCORES = 3 << 17
"""Scores of one block: 1.5 MB in fp32, so that two cores keep them in their second-level caches."""

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


def _hides_a_row(added: torch.Tensor) -> bool:
    """Whether some row has no allowed key at all."""
    return bool((added.amax(-1) == -math.inf).any())


def _factor(query: torch.Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


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
    extra: tuple[torch.Tensor, ...] = ()
    if is_causal:
        extra = (_causal(query.shape[-2], key.shape[-2], torch.float32),)
    elif mask is not None:
        added = _additive(mask, query)
        if _hides_a_row(added):
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
        extra = (added,)
    out = _run((query.float(), key.float(), value.float(), *extra), _factor(query, scale))
    result = torch.empty_like(query)  # torch's kernel lays its result out like the query, and views of it rely on that
    return out if (out.dtype, out.stride()) == (result.dtype, result.stride()) else result.copy_(out)


def attention_blocked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """The same as `attention`, by two oneDNN products and a softmax for each head and block of rows.

    Scores and softmax are fp32, as in torch's kernel; probabilities have the dtype of the value. Under a causal mask
    a block reads only the keys up to its last row.
    """
    added = None if mask is None else _additive(mask, query)
    if added is not None and _hides_a_row(added):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    result = torch.empty_like(query)
    batch, heads, length, _ = query.shape
    if added is not None:
        added = added.expand(batch, heads, length, key.shape[-2])
    for b in range(batch):
        for h in range(heads):
            hidden = None if added is None else added[b, h]
            q = query[b, h].float() * _factor(query, scale)
            _head(q, key[b, h].float().contiguous(), value[b, h].t().contiguous(), hidden, is_causal, result[b, h])
    return result


def _head(
    q: torch.Tensor, k: torch.Tensor, vt: torch.Tensor, added: torch.Tensor | None, causal: bool, out: torch.Tensor
) -> None:
    """One head into `out` [L, D]: scaled q [L, D] and k [S, D] in fp32, the transposed value vt [D, S]."""
    length, keys = q.shape[0], k.shape[0]
    rows = max(32, BLOCK_SCORES // keys // 32 * 32)
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        seen = min(keys, stop) if causal else keys
        scores = _product(q[start:stop], k[:seen])
        if added is not None:
            scores += added[start:stop]
        if causal and seen > start + 1:
            later = torch.ones(stop - start, seen - start, dtype=torch.bool).triu_(1)
            scores[:, start:].masked_fill_(later, -math.inf)
        weights = torch.softmax(scores, -1).to(vt.dtype)
        out[start:stop] = _product(weights, vt[:, :seen])


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [m, k] @ w[n, k].T by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "")


def _meta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    return torch.empty_like(query)


_SCHEMA = "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale) -> Tensor"
_library = torch.library.Library(NAMESPACE, "DEF")
for _function in (attention, attention_blocked):
    _library.define(_function.__name__ + _SCHEMA)
    _library.impl(_function.__name__, _function, "CPU")
    _library.impl(_function.__name__, _meta, "Meta")

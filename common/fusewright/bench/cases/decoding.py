"""Decoding with batch 1 and a static, half-full key-value cache: `decode:llama`.

A call is a number of steps issued in succession, none waiting on the host for the previous one. The tokens are given, so that
the logits of contenders are comparable, and each call writes the same positions of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.bench.models import Size, seeded
from fusewright.bench.suite import HALVES, Built, UnknownModel
from fusewright.errors import nearest
from fusewright.interface import HOST

PREFIX = "decode"
NAMES = (f"{PREFIX}:llama",)


@dataclass(frozen=True)
class Geometry:
    """A Llama: its configuration, the length of its cache, the number of tokens decoded per call."""

    config: dict[str, Any]
    context: int
    steps: int


GEOMETRIES: dict[Size, Geometry] = {
    "full": Geometry(  # 1 B parameters
        {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 8192, "vocab_size": 32000}, 1024, 32,
    ),
    "small": Geometry(
        {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
         "intermediate_size": 128, "vocab_size": 256}, 64, 4,
    ),
}  # fmt: skip


class Decoder(nn.Module):
    """A causal language model with a half-full cache. Converting the module also converts the cache."""

    def __init__(self, model: nn.Module, cache: Any) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        self.filled = [layer.cumulative_length.clone() for layer in cache.layers]

    def forward(self, token: Tensor, position: Tensor) -> Tensor:
        """Logits [1, 1, vocabulary] of the token after `token` [1, 1]; adds one token to the cache."""
        out: Tensor = self.model(token, position_ids=position, past_key_values=self.cache, use_cache=True).logits
        return out

    def rewind(self) -> None:
        """Drop the tokens beyond the first half."""
        for layer, before in zip(self.cache.layers, self.filled, strict=True):
            layer.cumulative_length.copy_(before)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)
        for layer in self.cache.layers:
            layer.keys, layer.values, layer.cumulative_length = map(fn, (layer.keys, layer.values, layer.cumulative_length))
            layer.dtype, layer.device = layer.keys.dtype, layer.keys.device
        return self


def is_decoding(model: str) -> bool:
    """Whether the name is one of this module's."""
    return model.startswith(f"{PREFIX}:")


def check(ref: str) -> None:
    """Raises `UnknownModel`."""
    if ref not in NAMES:
        raise UnknownModel(f"there is no {ref!r}; {nearest(ref, NAMES)}")


def build_decoding(
    ref: str, size: Size = "full", dtype: str = "fp32", device: str = HOST, steps: int | None = None, seed: int = 0
) -> Built:
    """The call for `decode:llama`, created on the device. `extra["bytes"]` is what each of its `extra["tokens"]` steps must
    read.

    Raises `UnknownModel`.
    """
    check(ref)
    if dtype == "amp":
        raise UnknownModel(f"{ref} decodes in fp32, {', '.join(HALVES)}, not amp")
    geometry = GEOMETRIES[size]
    steps, start = steps or geometry.steps, geometry.context // 2
    import transformers

    config = transformers.LlamaConfig(**geometry.config)
    with seeded(seed, device), torch.no_grad():
        model = transformers.LlamaForCausalLM(config).eval().to(HALVES.get(dtype, torch.float32))
        cache = transformers.StaticCache(config=config, max_cache_len=geometry.context)
        model(torch.randint(0, config.vocab_size, (1, start)), past_key_values=cache, use_cache=True)
        tokens = torch.randint(0, config.vocab_size, (steps, 1, 1))
        positions = torch.arange(start, start + steps).view(steps, 1, 1)

    def drive(fn: Any, tokens: Tensor, positions: Tensor) -> Callable[[], list[Tensor]]:
        given = list(zip(tokens.unbind(), positions.unbind(), strict=True))

        def decode() -> list[Tensor]:
            fn.rewind()
            return [fn(token, position).clone() for token, position in given]  # a replay overwrites its last results

        return decode

    extra = {"bytes": _read(model, geometry), "tokens": steps}
    return Built(ref, Decoder(model, cache), (tokens, positions), dtype=dtype, extra=extra, device=device, drive=drive)


def _read(model: nn.Module, geometry: Geometry) -> int:
    """Bytes read by a step: every weight except the embedding table, of which it reads one row, and the whole cache."""
    weights = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" not in name)
    c = geometry.config
    width = c["num_key_value_heads"] * c["hidden_size"] // c["num_attention_heads"]
    return weights + 2 * c["num_hidden_layers"] * geometry.context * width * next(model.parameters()).element_size()

"""The models of the table of `ci/gpu/check.py`: published geometries at sizes that fill a data-centre GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class GpuModel:
    """A transformers class with its config; `inputs` and `labels` make what a call takes, from the config."""

    label: str
    model: str
    config: str
    inputs: Callable[[Any], Tensors]
    labels: Callable[[Any], Tensors]
    overrides: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)

    def build(self, device: str = "cuda") -> tuple[torch.nn.Module, dict[str, Any], Tensors]:
        """The module (fp32, eval mode, random weights), keyword inputs and labels, all on the device."""
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.overrides)
        with torch.device(device):
            module = getattr(transformers, self.model)(config).eval()
            return module, {**self.inputs(config), **self.call}, self.labels(config)


def _tokens(batch: int, length: int, *names: str) -> Callable[[Any], Tensors]:
    return lambda config: {n: torch.randint(0, config.vocab_size, (batch, length)) for n in names or ("input_ids",)}


def _pixels(batch: int) -> Callable[[Any], Tensors]:
    return lambda config: {"pixel_values": torch.randn(batch, 3, 224, 224)}


def _classes(batch: int) -> Callable[[Any], Tensors]:
    return lambda config: {"labels": torch.randint(0, config.num_labels, (batch,))}


_IMAGES = {"num_labels": 1000, "problem_type": "single_label_classification"}
_NO_CACHE = {"use_cache": False}

MODELS: dict[str, GpuModel] = {
    "bert": GpuModel(
        "BERT-base MLM 16x512", "BertForMaskedLM", "BertConfig", _tokens(16, 512), _tokens(16, 512, "labels")
    ),
    "vit": GpuModel(
        "ViT-base 64x224", "ViTForImageClassification", "ViTConfig", _pixels(64), _classes(64), _IMAGES
    ),
    "distilgpt2": GpuModel(
        "distilGPT-2 16x512", "GPT2LMHeadModel", "GPT2Config", _tokens(16, 512), _tokens(16, 512, "labels"),
        {"n_layer": 6}, _NO_CACHE,
    ),
    "t5_small": GpuModel(
        "T5-small 8x512", "T5ForConditionalGeneration", "T5Config", _tokens(8, 512, "input_ids", "decoder_input_ids"),
        _tokens(8, 512, "labels"), {}, _NO_CACHE,
    ),
    "resnet50": GpuModel(
        "ResNet-50 128x224", "ResNetForImageClassification", "ResNetConfig", _pixels(128), _classes(128), _IMAGES
    ),
    "llama": GpuModel(
        "Llama 2048x8 4x1024", "LlamaForCausalLM", "LlamaConfig", _tokens(4, 1024), _tokens(4, 1024, "labels"),
        {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 5632}, _NO_CACHE,
    ),
}  # fmt: skip
"""Rows of the table, in its order."""


class Decoding:
    """Greedy decoding, batch 1, of a Llama-like model of 1 B parameters in bf16 with a static cache that is `context` long
    and half full. `bytes` is what a step must read."""

    def __init__(self, compile: Callable[[Any], Any], context: int = 1024) -> None:
        import transformers

        config = transformers.LlamaConfig(
            hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
            vocab_size=32000,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device("cuda"):
            module = transformers.LlamaForCausalLM(config).eval().bfloat16()
            self.token = torch.randint(0, config.vocab_size, (1, 1))
            self.position = torch.full((1, 1), context // 2)
            start = torch.randint(0, config.vocab_size, (1, context // 2))
        self.cache = transformers.StaticCache(config=config, max_cache_len=context)
        with torch.no_grad():
            module(start, past_key_values=self.cache, use_cache=True)
        layers = [t for layer in self.cache.layers for t in (layer.keys, layer.values, layer.cumulative_length)]
        self.state = [(t, t.clone()) for t in (self.token, self.position, *layers)]
        self.forward = compile(module.forward)
        weights = sum(p.numel() for n, p in module.named_parameters() if "embed_tokens" not in n)
        heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
        self.bytes = 2 * (weights + 2 * config.num_hidden_layers * context * heads)

    def step(self) -> torch.Tensor:
        """Logits of the next token; the cache has one token more."""
        given = {"position_ids": self.position, "past_key_values": self.cache, "use_cache": True}
        logits: torch.Tensor = self.forward(self.token, **given).logits
        return logits

    def restore(self) -> None:
        """Back to the half full cache."""
        for t, before in self.state:
            t.copy_(before)

    def decode(self, steps: int, given: torch.Tensor | None = None, logits: list[torch.Tensor] | None = None) -> torch.Tensor:
        """The next tokens [steps]. No step waits for the one before on the host. `given` are the tokens that are appended;
        by default the likeliest ones. `logits` is given those of every step, [1, vocabulary]."""
        tokens = []
        for k in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            out = self.step()[:, -1]
            tokens.append(out.argmax(-1, keepdim=True))
            if logits is not None:
                logits.append(out.clone())
            self.token.copy_(tokens[-1] if given is None else given[k].view(1, 1))
            self.position.add_(1)
        return torch.cat(tokens).flatten()

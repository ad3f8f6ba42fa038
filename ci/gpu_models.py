"""The models of the table of `ci/gpu_check.py`: published geometries at sizes that fill a data-centre GPU."""

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


def decoder(compile: Callable[[Any], Any], context: int = 1024) -> tuple[Callable[[], Any], int]:
    """One step of greedy decoding, batch 1, of a Llama-like model of 1 B parameters in bf16 with a static cache that is
    `context` long and half full; and the bytes that a step must read."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, intermediate_size=8192,
        vocab_size=32000,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        module = transformers.LlamaForCausalLM(config).eval().bfloat16()
        token = torch.randint(0, config.vocab_size, (1, 1))
        position = torch.full((1, 1), context // 2)
        start = torch.randint(0, config.vocab_size, (1, context // 2))
    cache = transformers.StaticCache(config=config, max_cache_len=context)
    with torch.no_grad():
        module(start, past_key_values=cache, use_cache=True)
    forward = compile(module.forward)

    def step() -> Any:
        return forward(token, position_ids=position, past_key_values=cache, use_cache=True).logits

    weights = sum(p.numel() for n, p in module.named_parameters() if "embed_tokens" not in n)
    heads = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    return step, 2 * (weights + 2 * config.num_hidden_layers * context * heads)

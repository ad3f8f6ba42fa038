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

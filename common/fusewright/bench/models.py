"""The models of the suite as data: a transformers class, its config, two geometries, and the inputs.

Weights are random and seeded; nothing is downloaded. "full" is the published geometry (batch 1, 128 tokens or 224x224 pixels
for inference), "small" a tiny one for tests. `transformers` is imported when a model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch

from fusewright.interface import HOST

Size: TypeAlias = Literal["full", "small"]
Kwargs: TypeAlias = dict[str, torch.Tensor]
MakeInputs: TypeAlias = Callable[[Any, Size], Kwargs]


@dataclass(frozen=True)
class ModelSpec:
    """One model: classes by name, config overrides per size, and functions from (config, size) to keyword inputs.

    `labels` are the additional inputs of a training step; a model without them is for inference only.
    """

    model: str
    config: str
    inputs: MakeInputs
    full: Mapping[str, Any] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    labels: MakeInputs | None = None
    train_batch: int = 4
    in_suite: bool = True


def _tokens(length: int = 128, small: int = 16) -> MakeInputs:
    def make(config: Any, size: Size) -> Kwargs:
        shape = (1, length if size == "full" else small)
        return {"input_ids": torch.randint(0, config.vocab_size, shape)}

    return make


def _padded_tokens(config: Any, size: Size) -> Kwargs:
    # A padded batch, so that a mask reaches attention, as with a tokenizer's output
    inputs = _tokens()(config, size)
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, -mask.shape[1] // 8 :] = 0
    return {**inputs, "attention_mask": mask}


def _encoder_decoder_tokens(config: Any, size: Size) -> Kwargs:
    ids = _tokens()(config, size)["input_ids"]
    return {"input_ids": ids, "decoder_input_ids": torch.randint(0, config.vocab_size, ids.shape)}


def _pixels(config: Any, size: Size) -> Kwargs:
    side = 224 if size == "full" else getattr(config, "image_size", 64)
    return {"pixel_values": torch.randn(1, 3, side, side)}


def _audio(config: Any, size: Size) -> Kwargs:
    ids = torch.randint(0, config.vocab_size, (1, 64 if size == "full" else 8))
    frames = 2 * config.max_source_positions
    return {"input_features": torch.randn(1, config.num_mel_bins, frames), "decoder_input_ids": ids}


def _token_labels(config: Any, size: Size) -> Kwargs:
    return {"labels": _tokens()(config, size)["input_ids"]}


def _class_labels(config: Any, size: Size) -> Kwargs:
    return {"labels": torch.randint(0, config.num_labels, (1,))}


SMALL_TEXT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
SMALL_VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8, "num_labels": 10,
}  # fmt: skip
SMALL_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96, "n_positions": 64}
SMALL_RESNET = {"embedding_size": 8, "depths": [1, 2], "num_labels": 10}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_ONE_LABEL = {"problem_type": "single_label_classification"}
_NO_CACHE = {"use_cache": False}

MODELS: dict[str, ModelSpec] = {
    "bert": ModelSpec("BertModel", "BertConfig", _tokens(), small=SMALL_TEXT),
    "distilbert": ModelSpec(
        "DistilBertModel", "DistilBertConfig", _padded_tokens,
        small={"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 96,
               "max_position_embeddings": 64},
    ),
    "gpt2": ModelSpec("GPT2LMHeadModel", "GPT2Config", _tokens(), small=SMALL_GPT2, call=_NO_CACHE),
    "t5_small": ModelSpec(
        "T5ForConditionalGeneration", "T5Config", _encoder_decoder_tokens, call=_NO_CACHE,
        small={"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 96},
    ),
    "llama": ModelSpec(
        "LlamaForCausalLM", "LlamaConfig", _tokens(), call=_NO_CACHE,
        full={"hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12,
              "num_key_value_heads": 12, "intermediate_size": 2048},
        small={**SMALL_TEXT, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "vit": ModelSpec("ViTForImageClassification", "ViTConfig", _pixels, small=SMALL_VIT),
    "resnet50": ModelSpec(
        "ResNetForImageClassification", "ResNetConfig", _pixels, full={"num_labels": 1000},
        small={**SMALL_RESNET, "hidden_sizes": [16, 32]},
    ),
    "convnext_tiny": ModelSpec(
        "ConvNextForImageClassification", "ConvNextConfig", _pixels, full={"num_labels": 1000},
        small={"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "image_size": 64,
               "num_labels": 10},
    ),
    "swin_tiny": ModelSpec(
        "SwinForImageClassification", "SwinConfig", _pixels, full={"num_labels": 1000},
        small={"embed_dim": 16, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4, "image_size": 64,
               "num_labels": 10},
    ),
    "mobilenet_v2": ModelSpec(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", _pixels, full={"num_labels": 1000},
        small={"depth_multiplier": 0.25, "image_size": 64, "num_labels": 10},
    ),
    "whisper_tiny": ModelSpec(
        "WhisperModel", "WhisperConfig", _audio, call=_NO_CACHE,
        small={"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
               "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 96,
               "max_source_positions": 32, "max_target_positions": 32, "num_mel_bins": 16, "pad_token_id": 0,
               "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
    # Geometries for the training step.
    "bert_small": ModelSpec(
        "BertForMaskedLM", "BertConfig", _tokens(), labels=_token_labels, in_suite=False,
        full={"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
              "intermediate_size": 2048, **_NO_DROPOUT},
        small={**SMALL_TEXT, **_NO_DROPOUT},
    ),
    "resnet18": ModelSpec(
        "ResNetForImageClassification", "ResNetConfig", _pixels, labels=_class_labels, in_suite=False,
        full={"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512],
              "num_labels": 1000, **_ONE_LABEL},
        small={**SMALL_RESNET, "hidden_sizes": [8, 16], "layer_type": "basic", **_ONE_LABEL},
    ),
    "gpt2_small": ModelSpec(
        "GPT2LMHeadModel", "GPT2Config", _tokens(), labels=_token_labels, call=_NO_CACHE, in_suite=False,
        full={"n_embd": 512, "n_layer": 4, "n_head": 8, **_GPT2_NO_DROPOUT},
        small={**SMALL_GPT2, **_GPT2_NO_DROPOUT},
    ),
    "vit_small": ModelSpec(
        "ViTForImageClassification", "ViTConfig", _pixels, labels=_class_labels, in_suite=False,
        full={"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536,
              "num_labels": 1000, **_ONE_LABEL, **_NO_DROPOUT},
        small={**SMALL_VIT, **_ONE_LABEL, **_NO_DROPOUT},
    ),
}  # fmt: skip


@contextmanager
def seeded(seed: int, device: str = HOST) -> Iterator[None]:
    """Create tensors on the device, from random numbers of this seed; the global random state is unchanged."""
    where = torch.device(device)
    kept = {} if where.type == HOST else {"device_type": where.type}
    with torch.random.fork_rng(devices=[where.index or 0] if kept else [], **kept), where:
        torch.manual_seed(seed)
        yield


def instantiate(
    spec: ModelSpec, size: Size, seed: int, device: str = HOST
) -> tuple[torch.nn.Module, dict[str, Any], Kwargs]:
    """The module in eval mode (fp32), its keyword inputs, and the labels for training, created on the device.

    Raises `ImportError` with the fix if transformers is missing. The global random state is unchanged.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("the models of the suite need transformers: pip install 'fusewright[bench]'") from error
    transformers.logging.set_verbosity_error()
    with seeded(seed, device):
        config = getattr(transformers, spec.config)(**(spec.full if size == "full" else spec.small))
        module: torch.nn.Module = getattr(transformers, spec.model)(config).eval()
        _make_vectors_matter(module)
        inputs = {**spec.inputs(config, size), **spec.call}
        labels = spec.labels(config, size) if spec.labels is not None else {}
    return module, inputs, labels


def _make_vectors_matter(module: torch.nn.Module) -> None:
    """Perturb biases and norms: new models have zero biases and identity norms, which would hide a wrong bias, fold or scale."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() <= 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.1)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)

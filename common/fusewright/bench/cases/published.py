"""More published geometries for `large:NAME`, of architectures that the suite lacks: their inputs and sizes.

A model without `labels` minimizes the mean square of its outputs, if its own loss is not a tensor program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fusewright.bench.models import MODELS, SMALL_TEXT, SMALL_VIT, Kwargs, MakeInputs, ModelSpec, Size

SMALL_BATCH, SMALL_LENGTH = 2, 16
_SAMPLES: Mapping[Size, int] = {"full": 16_000 * 5, "small": 1_600}
_FRAMES_PER_LABEL = 2_000
"""Audio samples per label: few enough labels to fit in the frames of the small geometry."""


def tokens(batch: int, length: int, *names: str) -> MakeInputs:
    """Random tokens under these names."""

    def make(config: Any, size: Size) -> Kwargs:
        shape = (batch, length) if size == "full" else (SMALL_BATCH, SMALL_LENGTH)
        return {name: torch.randint(0, config.vocab_size, shape) for name in names or ("input_ids",)}

    return make


def pixels(batch: int, side: int = 224, small: int = 64) -> MakeInputs:
    """Images; at the small size, of the side that the configuration specifies, if any."""

    def make(config: Any, size: Size) -> Kwargs:
        edge = side if size == "full" else getattr(config, "image_size", small)
        return {"pixel_values": torch.randn(batch if size == "full" else SMALL_BATCH, 3, edge, edge)}

    return make


def classes(batch: int) -> MakeInputs:
    """A label for each image."""
    return lambda config, size: {"labels": torch.randint(0, config.num_labels, (batch if size == "full" else SMALL_BATCH,))}


def _pixel_labels(batch: int, side: int) -> MakeInputs:
    def make(config: Any, size: Size) -> Kwargs:
        shape = (batch, side, side) if size == "full" else (SMALL_BATCH, 64, 64)
        return {"labels": torch.randint(0, config.num_labels, shape)}

    return make


def _waves(batch: int) -> MakeInputs:
    return lambda config, size: {"input_values": torch.randn(batch if size == "full" else SMALL_BATCH, _SAMPLES[size])}


def _letters(batch: int) -> MakeInputs:
    def make(config: Any, size: Size) -> Kwargs:
        shape = (batch if size == "full" else SMALL_BATCH, max(1, _SAMPLES[size] // _FRAMES_PER_LABEL))
        return {"labels": torch.randint(1, config.vocab_size, shape)}

    return make


def _spectra(batch: int) -> MakeInputs:
    def make(config: Any, size: Size) -> Kwargs:
        batch_of, length = (batch, 128) if size == "full" else (SMALL_BATCH, 8)
        frames = torch.randn(batch_of, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": frames, "decoder_input_ids": torch.randint(0, config.vocab_size, (batch_of, length))}

    return make


IMAGES: Mapping[str, Any] = {"num_labels": 1000, "problem_type": "single_label_classification"}
FEW: Mapping[str, Any] = {"num_labels": 10, "problem_type": "single_label_classification"}
NO_CACHE = {"use_cache": False}


def _text(model: str, config: str, batch: int, length: int, full: Mapping[str, Any], small: Mapping[str, Any]) -> ModelSpec:
    """A language model with a loss over tokens."""
    return ModelSpec(
        model, config, tokens(batch, length), full=full, small=small, labels=tokens(batch, length, "labels"),
        call=NO_CACHE if model.endswith("CausalLM") else {},
    )  # fmt: skip


def _image(model: str, config: str, batch: int, side: int, full: Mapping[str, Any], small: Mapping[str, Any]) -> ModelSpec:
    """A classifier of images."""
    return ModelSpec(
        model, config, pixels(batch, side), full={**IMAGES, **full}, small={**small, **FEW}, labels=classes(batch)
    )


PUBLISHED: dict[str, ModelSpec] = {
    "opt": _text(  # 125 M parameters, 8 x 1024 tokens
        "OPTForCausalLM", "OPTConfig", 8, 1024, {},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 64, "vocab_size": 96,
         "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    ),
    "deberta_v2": _text(  # base, version 3: 8 x 512 tokens
        "DebertaV2ForMaskedLM", "DebertaV2Config", 8, 512,
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
         "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
         "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
        {**SMALL_TEXT, "relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True,
         "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
    ),
    "segformer": ModelSpec(  # B0, 16 images of 512
        "SegformerForSemanticSegmentation", "SegformerConfig", pixels(16, 512), labels=_pixel_labels(16, 512),
        full={"num_labels": 150},
        small={"num_labels": 10, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16,
               "num_attention_heads": [1, 2, 2, 2]},
    ),
    "qwen2": _text(  # the layers of 0.5 B parameters, 4 x 1024 tokens
        "Qwen2ForCausalLM", "Qwen2Config", 4, 1024,
        {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
         "intermediate_size": 4864, "vocab_size": 32000, "tie_word_embeddings": True},
        {**SMALL_TEXT, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "efficientnet": _image(  # B0, 64 images
        "EfficientNetForImageClassification", "EfficientNetConfig", 64, 224,
        {"width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280, "dropout_rate": 0.2},
        {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320, "image_size": 64},
    ),
    "wav2vec2": ModelSpec(  # base, 8 times five seconds
        "Wav2Vec2ForCTC", "Wav2Vec2Config", _waves(8), labels=_letters(8),
        full={"apply_spec_augment": False, "layerdrop": 0.0},
        small={**SMALL_TEXT, "apply_spec_augment": False, "layerdrop": 0.0, "conv_dim": [16] * 3, "conv_stride": [5, 2, 2],
               "conv_kernel": [10, 3, 3], "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
               "num_feat_extract_layers": 3},
    ),
    "albert": _text(  # base, 16 x 512 tokens
        "AlbertForMaskedLM", "AlbertConfig", 16, 512,
        {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}, {**SMALL_TEXT, "embedding_size": 16},
    ),
    "roberta": _text(  # base, 16 x 512 tokens
        "RobertaForMaskedLM", "RobertaConfig", 16, 512, {"vocab_size": 50265, "max_position_embeddings": 514}, SMALL_TEXT,
    ),
    "electra": _text(  # base, 16 x 512 tokens
        "ElectraForMaskedLM", "ElectraConfig", 16, 512,
        {"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        {**SMALL_TEXT, "embedding_size": 16},
    ),
    "bloom": _text(  # eight layers of 560 M parameters, 4 x 1024 tokens
        "BloomForCausalLM", "BloomConfig", 4, 1024,
        {"hidden_size": 1024, "n_layer": 8, "n_head": 16, "vocab_size": 32000},
        {"hidden_size": 32, "n_layer": 2, "n_head": 2, "vocab_size": 96},
    ),
    "gpt_neox": _text(  # Pythia, 160 M parameters, 8 x 1024 tokens
        "GPTNeoXForCausalLM", "GPTNeoXConfig", 8, 1024,
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
         "vocab_size": 50304},
        SMALL_TEXT,
    ),
    "mpnet": _text("MPNetForMaskedLM", "MPNetConfig", 16, 512, {"max_position_embeddings": 514}, SMALL_TEXT),
    "beit": _image(  # base, 64 images
        "BeitForImageClassification", "BeitConfig", 64, 224, {"use_relative_position_bias": True, "layer_norm_eps": 1e-12},
        {**SMALL_VIT, "use_relative_position_bias": True, "out_indices": None},
    ),
    "dinov2": _image("Dinov2ForImageClassification", "Dinov2Config", 32, 224, {"image_size": 224}, SMALL_VIT),
    "regnet": _image(  # Y, 64 images
        "RegNetForImageClassification", "RegNetConfig", 64, 224, {},
        {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
    ),
    "mobilevit": _image(  # small, 64 images of 256
        "MobileViTForImageClassification", "MobileViTConfig", 64, 256, {},
        {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64], "num_attention_heads": 2,
         "image_size": 64},
    ),
    "detr": ModelSpec(  # ResNet-50, 4 images of 800
        "DetrForObjectDetection", "DetrConfig", pixels(4, 800),
        full={"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
              "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]}},
        small={"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
               "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1],
                                   "out_features": ["stage2"]},
               "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
               "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 8, "num_labels": 5},
    ),
    "distilbert": _text(  # 16 x 512 tokens
        "DistilBertForMaskedLM", "DistilBertConfig", 16, 512, {}, MODELS["distilbert"].small,
    ),
    "convnext_tiny": _image("ConvNextForImageClassification", "ConvNextConfig", 64, 224, {}, MODELS["convnext_tiny"].small),
    "swin_tiny": _image("SwinForImageClassification", "SwinConfig", 64, 224, {}, MODELS["swin_tiny"].small),
    "mobilenet_v2": _image("MobileNetV2ForImageClassification", "MobileNetV2Config", 128, 224, {}, MODELS["mobilenet_v2"].small),
    "whisper_tiny": ModelSpec(  # 8 times thirty seconds
        "WhisperForConditionalGeneration", "WhisperConfig", _spectra(8), small=MODELS["whisper_tiny"].small, call=NO_CACHE,
        labels=lambda config, size: {"labels": torch.randint(0, config.vocab_size, (8, 128) if size == "full" else (2, 8))},
    ),
}  # fmt: skip

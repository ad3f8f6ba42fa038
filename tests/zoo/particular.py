"""What the rules of `geometry` and `inputs` do not find, by the name of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_RESNET = {"backbone_config": {"backbone": "resnet18"}}
_SWIN = {"backbone_config": {"embed_dim": 48, "num_heads": [3, 6, 12, 24], "depths": [1, 1, 1, 1]}}
_MASKS = {**_SWIN, "encoder_layers": 2, "decoder_layers": 3, "common_stride": 4, "encoder_feedforward_dim": 128}
_HGNET = {
    "backbone_config": {
        "stem_channels": [3, 16, 16], "stage_in_channels": [16, 32, 64, 128], "stage_mid_channels": [16] * 4,
        "stage_out_channels": [32, 64, 128, 256], "hidden_sizes": [32, 64, 128, 256], "stage_num_blocks": [1] * 4,
        "stage_numb_of_layers": [2] * 4,
    },
    "encoder_in_channels": [64, 128, 256], "encode_proj_layers": [2], "decoder_in_channels": [64] * 3,
}  # fmt: skip
_SERIES = {"prediction_length": 8, "context_length": 16, "num_time_features": 2}
_EXPERTS = {
    "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
_EFFICIENTNET = {
    "in_channels": [32, 16, 24, 40, 80, 112, 192], "out_channels": [16, 24, 40, 80, 112, 192, 320], "hidden_dim": 1280,
    "width_coefficient": 1.0, "depth_coefficient": 1.0,
}  # fmt: skip
_HEAD = {"head_dim": 16}
_GEMMA3N = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "intermediate_size": [128] * 4, "activation_sparsity_pattern": [0.95, 0.0] * 2,
}  # fmt: skip
_POOLED = {"num_key_value_heads": 4, "index_topk": 8, "index_kpool": 4}
_RT_DETR = {"encode_proj_layers": [2], "decoder_in_channels": [64] * 3}
_HUNYUAN = {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]}}
_QSA = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2,
    "layer_types": ["linear_attention", "full_attention"], "ngram_vocab_size_base": 200, "split_ngram_parts": 2,
    "make_ngram_vocab_size_divisible_by": 8, "eos_token_id": 2, "ple_layer_ids": [1], "ple_embed_dim": 16, "hc_lowrank": 16,
}  # fmt: skip
_TOKENIZER = {"upsample_groups": 64, "vector_quantization_hidden_dimension": 32, "codebook_dim": 32, "num_filters": 16}
_REPVIT = {
    "backbone_config": {
        "architecture": "repvit_m1.dist_in1k",
        "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
    },
    "backbone_channel_list": [384, 192, 96, 48],
}  # fmt: skip
_ROPES = {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")}
_COMPASS = {"rope_parameters": _ROPES, "layer_types": ["sliding_attention", "full_attention"]}
_VIBE = {"num_filters": 4, "depths": [1] * 7}
_AUDIO = {"num_hidden_layers": 4, "hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}
_SSM = {"n_groups": 2, "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16}
_DINO = {"image_size": 64, "patch_size": 16, "out_indices": [2], "out_features": None}

GEOMETRIES: Mapping[str, Mapping[str, Any]] = {
    "align": {"vision_config": _EFFICIENTNET, "projection_dim": 320},
    "autoformer": _SERIES,
    "blip-2": {"image_token_index": 5},
    "blt": {"encoder_hash_byte_group_vocab": 500, "decoder_config": {"hidden_size_global": 64}},
    "chameleon": {"vocabulary_map": {"<image>": 1, "IMGIMGAZ": 2, "IMGIMGBZ": 3}},
    "clap": {"audio_config": {"spec_size": 128, "window_size": 2, "depths": [1, 1, 1, 1]}},
    "clvp": {"text_config": {"num_attention_heads": 2}, "speech_config": {"num_attention_heads": 2}},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "conditional_detr": _RESNET,
    "csm": {"codec_config": _TOKENIZER},
    "d_fine": _HGNET,
    "dab-detr": _RESNET,
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "rope_theta": 10000.0, "kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 64,
        "hidden_size": 64}},
    "deepseek_ocr2": {"vision_config": {"sam_config": {"downsample_channels": [32, 64]}}, "text_config": {"mlp_layer_types":
        ["dense", "sparse"]}},
    "deepseek_v2": _EXPERTS,
    "deformable_detr": _RESNET,
    "deimv2": _HGNET,
    "depth_pro": {"patch_size": 64, "intermediate_hook_ids": [1, 0], **{f"{n}_model_config": _DINO for n in ("image", "patch",
        "fov")}},
    "detr": _RESNET,
    "diffusion_gemma": {"text_config": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}},
    "dots1": _EXPERTS,
    "dots3_note": {"text_config": {"num_key_value_heads": 4}, "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64}},
    "edgetam": {"vision_config": _REPVIT},
    "edgetam_vision_model": _REPVIT,
    "efficientloftr": {"stage_num_blocks": [1, 1, 2, 2], "out_features": [16, 16, 32, 64], "stage_in_channels": None,
        "fine_fusion_dims": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor":
        2.0}},
    "efficientnet": _EFFICIENTNET,
    "emu3": {"vq_config": {"base_channels": 32}, "vocabulary_map": {"<|extra_200|>": 1, "<image>": 2,
        "<|visual token 000000|>": 3, "<|visual token 000001|>": 4}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section":
        [3, 3, 2]}, "moe_intermediate_size": [32, 32]}},
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1, "position_embedding_type": "rotary", "token_dropout": True},
    "fast_vlm": {"vision_config": {"architecture": "fastvit_t8", "hidden_size": 768, "model_args": {"inference_mode": False}}},
    "flaubert": {"emb_dim": 64, "n_words": 128},
    "florence2": {"vision_config": {"embed_dim": [16, 32, 64, 128], "num_heads": [1, 2, 4, 8], "num_groups": [1, 2, 4, 8],
        "window_size": 4, "projection_dim": 64}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "gemma3n": {"text_config": _GEMMA3N, "vision_config": {"architecture": "resnet18", "hidden_size": 512, "model_args": {}}},
    "gemma3n_text": _GEMMA3N,
    "glm5_next": {"text_config": _POOLED},
    "glm5_next_text": _POOLED,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "1/2", "spatial_target_layers": [1],
    "vision_config": {"patch_size": 16}},
    "granite_speech5_ctc": {"context_size": 16, "num_key_value_heads": 4, "encoder_config": {"context_size": 16,
        "num_key_value_heads": 4}},
    "granite_speech5_encoder": {"context_size": 16, "num_key_value_heads": 4},
    "grounding-dino": {**_SWIN, "num_queries": 8},
    "hunyuan_v1_dense": _HEAD,
    "hunyuan_v1_moe": _HEAD,
    "hunyuan_vl": {"text_config": _HUNYUAN},
    "hunyuan_vl_text": _HUNYUAN,
    "informer": _SERIES,
    "instructblip": {"image_token_index": 5},
    "instructblipvideo": {"video_token_index": 5},
    "janus": {"vq_config": {"base_channels": 32}},
    "kosmos-2": {"latent_query_num": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 32, "num_key_value_heads": 4},
    "lw_detr": {"backbone_config": {"num_hidden_layers": 4, "patch_size": 4, "out_indices": [2, 4], "out_features": None,
        "window_block_indices": [0, 2], "pretrain_image_size": 64}, "projector_scale_factors": [2.0, 0.5]},
    "mamba2": {"num_heads": 8},
    "mask2former": _MASKS,
    "mimi_decoder": _TOKENIZER,
    "ministral": _HEAD,
    "mm-grounding-dino": {**_SWIN, "num_queries": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark": {"audio_config": _AUDIO},
    "muse_spark_audio": _AUDIO,
    "nemo_speechlm": {"text_config": _SSM},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": _SSM,
    "omdet-turbo": {"encoder_in_channels": [192, 384, 768], "encoder_projection_indices": [2]},
    "oneformer": _MASKS,
    "perceiver": {"d_latents": 64, "num_latents": 16, "num_self_attends_per_block": 2},
    "perception_lm": {"vision_config": {"architecture": "vit_pe_lang_large_patch14_448", "model_args": {"embed_dim": 64,
        "img_size": [56, 56], "depth": 2, "num_heads": 4, "global_pool": ""}}},
    "pi0": {"vlm_config": {"projection_dim": 64, "image_token_index": 5, "vision_config": {"projection_dim": 64}}},
    "pocket_tts_audio_tokenizer_decoder": {"upsample_groups": 64},
    "pp_doclayout_v3": {**_HGNET, "x4_feat_dim": 32},
    "pp_doclayout_v4": _HGNET,
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16,
        48], "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "num_buckets": 4, "hash_seed": 0},
    "rt_detr": _RT_DETR,
    "rt_detr_v2": _RT_DETR,
    "seggpt": {"image_size": [128, 64]},
    "siglip2": {"text_config": {"projection_size": 64}},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "t5gemma2": {"image_token_index": 5, "encoder": {"mm_tokens_per_image": 4, "image_token_index": 5}},
    "t5gemma2_encoder": {"mm_tokens_per_image": 4, "text_config": {"dropout_rate": 0.0}},
    "table-transformer": _RESNET,
    "time_series_transformer": _SERIES,
    "timm_backbone": {"backbone": "resnet18"},
    "tvp": {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 2, **_RESNET},
    "uvdoc": {"backbone_config": {"out_features": [f"stage{k}" for k in range(1, 7)], "out_indices": None}},
    "vibevoice": {"audio_config": _VIBE, "semantic_model_config": _VIBE},
    "vibevoice_acoustic_tokenizer": _VIBE,
    "vibevoice_acoustic_tokenizer_decoder": _VIBE,
    "vibevoice_acoustic_tokenizer_encoder": _VIBE,
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _VIBE, "semantic_tokenizer_encoder_config": _VIBE},
    "xclip": {"vision_config": {"mit_hidden_size": 32, "mit_num_attention_heads": 2, "mit_intermediate_size": 64}},
    "xlm": {"emb_dim": 64, "n_words": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "attention_hidden_size":
        128, "attention_head_dim": 32, "num_key_value_heads": 4},
}  # fmt: skip
"""Values of configurations; those of a part in a mapping of its own."""


def _floats(*shape: int) -> Callable[[int, int], Tensor]:
    return lambda batch, length: torch.randn(batch, *shape)


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(8, 100, (batch, length))


def _about_images(count: int) -> Callable[[int, int], Tensor]:
    """Tokens of which the first stand for an image: 5, in the geometries above."""
    return lambda batch, length: torch.cat([torch.full((batch, count), 5), _tokens(batch, length)], 1)


def _ones(*shape: int) -> Callable[[int, int], Tensor]:
    return lambda batch, length: torch.ones(batch, *shape, dtype=torch.long)


def _zeros(*shape: int) -> Callable[[int, int], Tensor]:
    return lambda batch, length: torch.zeros(batch, *shape, dtype=torch.long)


def _grids(side: int) -> Callable[[int, int], Tensor]:
    return lambda batch, length: torch.tensor([[1, side, side]] * batch)


def _cells() -> Tensor:
    """The places of 4 by 4 patches."""
    return torch.cartesian_prod(torch.arange(4), torch.arange(4))


def _pair(channels: int) -> Mapping[str, Any]:
    return {"pixel_values": _floats(2, channels, 64, 64)}


_PATCHES: Mapping[str, Callable[[int, int], Tensor]] = {
    "pixel_values": _floats(16, 768), "pixel_attention_mask": _ones(16),
    "spatial_shapes": lambda b, n: torch.tensor([[4, 4]] * b),
}  # fmt: skip

_PAST: Mapping[str, Callable[[int, int], Tensor]] = {
    "past_values": _floats(23), "past_time_features": _floats(23, 2), "past_observed_mask": lambda b, n: torch.ones(b, 23),
    "future_values": _floats(8), "future_time_features": _floats(8, 2),
}  # fmt: skip

INPUTS: Mapping[str, Mapping[str, Callable[[int, int], Tensor]]] = {
    "audioflamingo3_encoder": {"input_features": _floats(16, 128), "input_features_mask": _ones(128)},
    "autoformer": _PAST,
    "blip-2": {"input_ids": _about_images(8), "pixel_values": _floats(3, 64, 64)},
    "blip_2_qformer": {"query_embeds": _floats(8, 64), "encoder_hidden_states": _floats(16, 64)},
    "clap": {"input_ids": _tokens, "input_features": _floats(1, 512, 16)},
    "decision_transformer": {"states": lambda b, n: torch.randn(b, n, 17), "actions": lambda b, n: torch.randn(b, n, 4),
        "rewards": lambda b, n: torch.randn(b, n, 1), "returns_to_go": lambda b, n: torch.randn(b, n, 1), "timesteps": lambda b,
        n: torch.arange(n).expand(b, n)},
    "depth_pro": {"pixel_values": _floats(3, 256, 256)},
    "efficientloftr": _pair(1),
    "fun_asr_nano_encoder": {"input_features": _floats(63, 112), "input_features_mask": _ones(63)},
    "gemma3n_audio": {"audio_mel": _floats(64, 128), "audio_mel_mask": lambda b, n: torch.zeros(b, 64, dtype=torch.bool)},
    "gemma4_audio": {"input_features": _floats(64, 32)},
    "gemma4_vision": {"pixel_values": _floats(16, 768), "pixel_position_ids": lambda b, n: _cells().expand(b, 16, 2)},
    "granite_speech5_ctc": {"input_features": _floats(64, 64)},
    "granite_speech5_encoder": {"input_features": _floats(64, 64)},
    "idefics": {"input_ids": _tokens, "pixel_values": _floats(1, 3, 64, 64), "image_attention_mask": lambda b, n:
        torch.ones(b, n, 1)},
    "informer": _PAST,
    "inkling2_vision": {"pixel_values": lambda b, n: torch.randn(4 * b, 40, 40, 3), "image_grid_thw": _grids(2)},
    "instructblip": {"input_ids": _about_images(8), "qformer_input_ids": _tokens, "pixel_values": _floats(3, 64, 64)},
    "instructblipvideo": {"input_ids": _about_images(32), "qformer_input_ids": _tokens, "pixel_values": _floats(4, 3, 64, 64)},
    "kimi_k25_vision": {"pixel_values": lambda b, n: torch.randn(16 * b, 3, 14, 14), "grid_thw": _grids(4)},
    "kosmos-2": {"input_ids": _tokens, "pixel_values": _floats(3, 64, 64), "image_embeds_position_mask": lambda b, n:
        (torch.arange(n) < 8).long().expand(b, n)},
    "kyutai_speech_to_text": {"input_ids": lambda b, n: torch.randint(4, 100, (b, n, 33))},
    "lightglue": _pair(3),
    "lxmert": {"input_ids": _tokens, "visual_feats": _floats(10, 2048), "visual_pos": _floats(10, 4)},
    "mimi_decoder": {"latents": _floats(64, 8)},
    "muse_glimmer_assistant": {"noise_embeds": _floats(8, 64), "context_hidden_states": _floats(16, 128)},
    "muse_spark_audio": {"input_values": _floats(3840)},
    "musicgen_decoder": {"input_ids": lambda b, n: torch.randint(8, 100, (4 * b, n))},
    "musicgen_melody_decoder": {"input_ids": lambda b, n: torch.randint(8, 100, (4 * b, n))},
    "nemotron3_5_transcribe_word_timestamp": {"inputs_embeds": _floats(16, 64)},
    "omdet-turbo": {"pixel_values": _floats(3, 224, 224), "classes_input_ids": lambda b, n: torch.randint(8, 100, (2 * b, n)),
        "classes_attention_mask": lambda b, n: torch.ones(2 * b, n, dtype=torch.long), "tasks_input_ids": _tokens,
        "tasks_attention_mask": lambda b, n: torch.ones(b, n, dtype=torch.long), "classes_structure": lambda b, n:
        torch.full((b,), 2)},
    "perceiver": {"inputs": _floats(16, 64)},
    "pi0": {"input_ids": _tokens, "action_embeds": _floats(8, 64), "pixel_attention_mask": _ones(1), "pixel_values":
        _floats(1, 3, 64, 64)},
    "pocket_tts_audio_tokenizer_decoder": {"latents": _floats(64, 8)},
    "seggpt": {n: _floats(3, 64, 64) for n in ("pixel_values", "prompt_pixel_values", "prompt_masks")},
    "siglip2": {"input_ids": _tokens, **_PATCHES},
    "siglip2_vision_model": _PATCHES,
    "speecht5": {"input_values": _floats(16, 64), "decoder_input_values": _floats(8, 64)},
    "t5gemma2": {"input_ids": _about_images(4), "pixel_values": _floats(3, 64, 64), "decoder_input_ids": _tokens},
    "time_series_transformer": _PAST,
    "timesfm": {"past_values": _floats(64), "past_values_padding": _zeros(64), "freq": _zeros(1)},
    "timesfm2_5": {"past_values": _floats(64)},
    "tvp": {"input_ids": lambda b, n: _tokens(1, n), "pixel_values": lambda b, n: torch.randn(1, 2, 3, 64, 64)},
    "voxtral_realtime": {"input_ids": _tokens, "input_features": lambda b, n: torch.randn(b, 16, 8 * n)},
}  # fmt: skip
"""Makers of inputs for a batch size and a number of tokens."""

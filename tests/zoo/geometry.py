"""Small geometries of `transformers` configurations: the meaning of a number is inferred from its name.

A configuration is created by its class with small values for the parameters that `RULES` knows, so that values derived by the
class are right. Values that must fit together (heads times head size) follow from the same few numbers.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

WIDTH, HEADS, LAYERS, VOCABULARY, POSITIONS, IMAGE = 64, 4, 2, 128, 64, 64
HEAD = WIDTH // HEADS

Rule = tuple[re.Pattern[str], Callable[[Any], Any]]


def _to(value: Any) -> Callable[[Any], Any]:
    return lambda old: type(old)(value)


def _at_most(limit: int) -> Callable[[Any], Any]:
    return lambda old: min(old, limit)


def _small_image(old: Any) -> Any:
    return IMAGE if isinstance(old, int) else type(old)([IMAGE] * len(old))


def _small_features(old: list[list[int]]) -> list[list[int]]:
    """Sides of a backbone's features, which Segment Anything's configurations give for images of 1024."""
    return [[side * IMAGE // 1024 for side in sides] for sides in old]


def _rules(table: Mapping[str, Callable[[Any], Any]]) -> tuple[Rule, ...]:
    return tuple((re.compile(pattern), value) for pattern, value in table.items())


RULES: tuple[Rule, ...] = _rules(
    {
        r".*(num|n)_?(key_value|kv)_heads|multi_query_group_num": _at_most(2),
        r".*vocab_size(_per_layer_input)?": _at_most(VOCABULARY),
        r".*_token_id|.*_token_index": lambda old: old % VOCABULARY,
        r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_sequence_length|max_seq_len": _at_most(
            POSITIONS
        ),
        r".*(num|n)_.*heads|n_head|num_heads|encoder_attention_heads|decoder_attention_heads|.*_ffn_heads": _at_most(HEADS),
        r".*(num|n)_?(hidden_|encoder_|decoder_|.*)?layers?|(encoder|decoder)_layers|depth|num_.*blocks|.*_depth": _at_most(
            LAYERS
        ),
        r"(qk|v)_(nope_|rope_)?head_dim|.*head_dim|d_kv|attention_head_size|kv_channels": _at_most(HEAD),
        r"rotary_dim": _at_most(HEAD // 2),
        r".*_lora_rank|.*bottleneck.*|.*projection_dim|.*proj_dim|.*_rank": _at_most(32),
        r".*(intermediate|ffn|feed_forward|mlp|ff)_?(hidden_)?(size|dim|layer_size)|d_ff|n_inner|.*intermediate_size": _at_most(
            2 * WIDTH
        ),
        r"(num|n|moe)_.*experts|num_experts": _at_most(4),
        r"n_group|num_expert_group": _at_most(2),  # groups of experts; below, how many of them one token may use
        r"topk_group|first_k_dense_replace": _at_most(1),
        r".*experts_per_tok|.*top_?k|moe_k": _at_most(2),
        r"(.*_)?hidden_(size|dim)|d_model|n_embd|dim|.*embed_dim|.*embedding_size|.*embedding_dim|.*width|d_embed|.*_hidden_size": (
            _at_most(WIDTH)
        ),
        r"image_size": _small_image,
        r"num_queries|num_query_tokens|two_stage_num_proposals|num_object_queries": _at_most(8),
        r"num_frames|num_mel_bins": _at_most(16),
    }
)
LISTS: tuple[Rule, ...] = _rules(
    {
        r".*depths?|.*layers?|num_blocks.*": lambda old: [min(1, x) if isinstance(x, int) else x for x in old],
        r".*_indexes": lambda old: [LAYERS - 1],  # blocks with extra computation
        r".*hidden_sizes|.*channels|embed_dims?|.*_dims?|widths?": lambda old: (
            old if max(old) <= WIDTH else [max(8, x // 4 // 8 * 8) for x in old]
        ),
    }
)


def _in_sections(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions for time, height and width, each on its own section of a head."""
    half = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
    return {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


AS_WHOLE = "small, parts made from what the whole sets"
"""Parts are otherwise made from the defaults of their own class, which misses, say, the name of a detector's backbone."""
GEOMETRIES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("small", {}),
    ("small, positions in sections", {"rope_parameters": _in_sections}),
    ("small, as many heads for keys as for queries", {"num_key_value_heads": HEADS}),
    ("shallow, small images", {"image_size": _small_image, "backbone_feature_sizes": _small_features}),
    ("shallow", {}),
    (AS_WHOLE, {}),
)
"""Geometries in the order in which they are tried: a name, and values that override the rules or are computed from the default."""


def small(config: type, geometry: str = "small", particular: Mapping[str, Any] = MappingProxyType({}), whole: Any = None) -> Any:
    """Make an instance of a configuration class in one of `GEOMETRIES`; those called shallow reduce only depth and vocabulary.

    `particular` values override the rules, those of a part in a mapping of its own. `whole` is an instance with the defaults.
    Raises the class's errors for values that do not fit together.
    """
    own = dict(GEOMETRIES)[geometry]
    given, defaults = {}, _defaults(config, whole or config())
    depth = defaults.get("num_hidden_layers")
    for name, default in defaults.items():
        value = own.get(name) or _small_value(name, default, geometry, depth, particular.get(name, {}))
        value = value(default) if callable(value) else value
        if value is not default or whole is not None:
            given[name] = value
    given |= {n: v for n, v in particular.items() if not _is_config(defaults.get(n))}
    made = config(**given)
    if hasattr(made, "use_cache"):
        made.use_cache = False  # a cache cannot be compared; `generate` requests one
    return made


def _defaults(config: type, instance: Any) -> dict[str, Any]:
    """The value parameters of a configuration class, with the values of an instance."""
    names = [n for n in inspect.signature(config).parameters if n not in ("self", "kwargs", "args")]
    names += [n for n in ("out_indices", *getattr(config, "sub_configs", {})) if n not in names]
    if hasattr(instance, "allow_global_per_layer_attribute_access"):
        instance.allow_global_per_layer_attribute_access = True
    return {n: getattr(instance, n) for n in names if getattr(instance, n, None) is not None}


def _is_config(value: Any) -> bool:
    from transformers import PretrainedConfig

    return isinstance(value, PretrainedConfig)


def _small_value(name: str, value: Any, geometry: str, depth: int | None, particular: Any) -> Any:
    if _is_config(value):
        return small(type(value), geometry, particular, value if geometry == AS_WHOLE else None).to_dict()
    if isinstance(value, list) and value and len(value) == depth:
        return _of_each_kind(value)
    if isinstance(value, bool) or (geometry.startswith("shallow") and not re.search("layers?|vocab|depth|token", name)):
        return value
    if isinstance(value, list) and value and all(isinstance(x, int) for x in value):
        return _matched(LISTS, name, value)
    return _matched(RULES, name, value) if isinstance(value, int) or name == "image_size" else value


def _of_each_kind(value: list[Any]) -> list[Any]:
    """Shorten a per-layer list to `LAYERS` entries, with two kinds if it has two."""
    kinds = [x for k, x in enumerate(value) if x not in value[:k]]
    return (kinds + value)[:LAYERS] if len(kinds) > 1 else value[:LAYERS]


def _matched(rules: tuple[Rule, ...], name: str, value: Any) -> Any:
    for pattern, change in rules:
        if pattern.fullmatch(name):
            return change(value)
    return value

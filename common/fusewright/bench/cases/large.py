"""Published geometries at sizes that fill a data-centre GPU: `large:NAME`.

Training steps keep the dropout of their configurations, whose cost is part of a step. They are compared with fp64 without
dropout.
"""

from __future__ import annotations

from fusewright.bench.cases.published import FEW, IMAGES, NO_CACHE, PUBLISHED, classes, pixels, tokens
from fusewright.bench.models import SMALL_GPT2, SMALL_RESNET, SMALL_TEXT, SMALL_VIT, ModelSpec, Size, instantiate
from fusewright.bench.suite import Built, DType, TrainStep, UnknownModel, cast
from fusewright.errors import nearest
from fusewright.interface import HOST

PREFIX = "large"

LARGE: dict[str, ModelSpec] = {
    "bert": ModelSpec(  # 16 x 512 tokens
        "BertForMaskedLM", "BertConfig", tokens(16, 512), small=SMALL_TEXT, labels=tokens(16, 512, "labels"),
    ),
    "vit": ModelSpec(  # 64 images
        "ViTForImageClassification", "ViTConfig", pixels(64), full=IMAGES, small={**SMALL_VIT, **FEW}, labels=classes(64),
    ),
    "distilgpt2": ModelSpec(  # 16 x 512 tokens
        "GPT2LMHeadModel", "GPT2Config", tokens(16, 512), full={"n_layer": 6}, small=SMALL_GPT2, call=NO_CACHE,
        labels=tokens(16, 512, "labels"),
    ),
    "t5_small": ModelSpec(  # 8 x 512 tokens
        "T5ForConditionalGeneration", "T5Config", tokens(8, 512, "input_ids", "decoder_input_ids"), call=NO_CACHE,
        small={"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 96},
        labels=tokens(8, 512, "labels"),
    ),
    "resnet50": ModelSpec(  # 128 images
        "ResNetForImageClassification", "ResNetConfig", pixels(128), full=IMAGES,
        small={**SMALL_RESNET, "hidden_sizes": [16, 32], **FEW}, labels=classes(128),
    ),
    "llama": ModelSpec(  # eight layers of 2048, 4 x 1024 tokens
        "LlamaForCausalLM", "LlamaConfig", tokens(4, 1024), call=NO_CACHE, labels=tokens(4, 1024, "labels"),
        full={"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 5632},
        small={**SMALL_TEXT, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    **PUBLISHED,
}  # fmt: skip


def is_large(model: str) -> bool:
    """Whether a model's name is one of this module's."""
    return model.startswith(f"{PREFIX}:")


def names() -> list[str]:
    """`large:NAME` for every model; all of them train."""
    return [f"{PREFIX}:{name}" for name in LARGE]


def spec_of(ref: str) -> ModelSpec:
    """Raises `UnknownModel`."""
    name = ref.partition(":")[2]
    if name not in LARGE:
        raise UnknownModel(f"there is no {ref!r}; {nearest(ref, names())}")
    return LARGE[name]


def build_large(ref: str, size: Size = "full", dtype: DType = "fp32", device: str = HOST, seed: int = 0) -> Built:
    """The call for `large:NAME`, created on the device. Raises `UnknownModel`."""
    module, inputs, _ = instantiate(spec_of(ref), size, seed, device)
    return cast(Built(ref, module, (), inputs, device=device), dtype)


def large_step(ref: str, size: Size = "full", dtype: DType = "fp32", device: str = HOST, seed: int = 0) -> TrainStep:
    """The training step for `large:NAME`, created on the device. Raises `UnknownModel`."""
    module, inputs, labels = instantiate(spec_of(ref), size, seed, device)
    built = cast(Built(ref, module.train(), (), {**inputs, **labels}), dtype)
    return TrainStep(ref, module, dict(built.kwargs), dtype, device=device, drops=True)

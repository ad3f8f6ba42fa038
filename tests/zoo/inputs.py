"""Example inputs of a `transformers` model, from the parameters of its `forward` and from its configuration."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.zoo import particular

BATCH, LENGTH, FRAMES, GRID = 2, 16, 64, 4

Inputs = dict[str, Any]


def candidates(module: torch.nn.Module, length: int = LENGTH, batch: int = BATCH) -> Iterator[Inputs]:
    """Yield keyword inputs to try, the most complete first: not every model accepts all that its signature names."""
    torch.manual_seed(0)
    names = list(inspect.signature(module.forward).parameters)
    config: Any = module.config
    if makers := particular.INPUTS.get(config.model_type):
        yield {n: make(batch, length) for n, make in makers.items() if n in names}
    elif "grid_thw" in names:
        yield _patches(config, names, batch)
        return
    main, others = [n for n in names if n in _MAKERS], [n for n in names if n in _OTHERS]
    if not main and not others:
        return
    first = getattr(module, "main_input_name", (main or others)[0])
    least = [n for n in ([first] if isinstance(first, str) else first) if n in _MAKERS]
    chosen = [main, [n for n in main if not n.startswith("decoder_")], least or main[:1]]
    yield from _made(config, batch, length, chosen, _forms)
    yield from _made(config, batch, length, [others + main, *(others + keys for keys in chosen[1:]), main], _unusual)


def _made(
    config: Any, batch: int, length: int, chosen: Iterable[list[str]], forms: Callable[[Any, list[str]], Iterable[Form]]
) -> Iterator[Inputs]:
    seen: list[list[str]] = [[]]
    for keys in chosen:
        if keys in seen:
            continue
        seen.append(keys)
        for form in forms(config, keys):
            yield {n: (_MAKERS | _OTHERS)[n](config, batch, length, form) for n in keys}


class Form(NamedTuple):
    """Shapes of an example that configurations do not define."""

    image: tuple[int, ...]
    sound: tuple[int, ...]
    mel: tuple[int, ...] = ()


def _forms(config: Any, keys: list[str]) -> Iterator[Form]:
    sounds = _sounds(config) if "input_values" in keys else [()]
    yield from itertools.starmap(Form, itertools.product(_images(config), sounds))


def _unusual(config: Any, keys: list[str]) -> Iterator[Form]:
    """Yield videos as images, pairs of images, and spectrograms with the frames last or with a channel."""
    (size, *_), frames = _images(config), _find(config, "num_frames") or 8
    images = [size, (frames, *size), (2, *size)] if "pixel_values" in keys else [size]
    sounds = [*_sounds(config), (1, 4096)] if "input_values" in keys else [()]
    bins = _bins(config)
    mels = [(FRAMES, bins), (bins, FRAMES), (1, FRAMES, bins)] if "input_features" in keys else [()]
    yield from itertools.starmap(Form, itertools.product(images, sounds, mels))


def _images(config: Any) -> list[tuple[int, int, int]]:
    """The (channels, height, width) to try."""
    size, channels = _find(config, "image_size"), _find(config, "num_channels") or 3
    if isinstance(size, int):
        return [(channels, size, size)]
    if isinstance(size, (list, tuple)) and len(size) >= 2:
        return [(channels, size[-2], size[-1])]
    return [(channels, 64, 64), (channels, 224, 224)]


def _find(config: Any, name: str) -> Any:
    """Find an attribute of a configuration or of a nested one."""
    if getattr(config, name, None) is not None:
        return getattr(config, name)
    inner = [getattr(config, k) for k in getattr(config, "sub_configs", {}) if getattr(config, k, None) is not None]
    return next((v for c in inner if (v := _find(c, name)) is not None), None)


def _tokens(config: Any, batch: int, length: int, form: Form) -> Tensor:
    special = {v for k, v in config.to_dict().items() if k.endswith(("token_id", "token_index")) and isinstance(v, int)}
    known = [t for t in range(_find(config, "vocab_size") or 128) if t not in special] or [0]
    return torch.tensor(known)[torch.randint(0, len(known), (batch, length))]


def _pixels(config: Any, batch: int, length: int, form: Form) -> Tensor:
    return torch.randn(batch, *form.image)


def _video(config: Any, batch: int, length: int, form: Form) -> Tensor:
    return torch.randn(batch, _find(config, "num_frames") or 8, *form.image)


def _boxes(config: Any, batch: int, length: int, form: Form) -> Tensor:
    low, high = torch.randint(0, 20, (2, batch, length, 2))
    return torch.cat([low, low + high], -1)


def _mel(config: Any, batch: int, length: int, form: Form) -> Tensor:
    if form.mel:
        return torch.randn(batch, *form.mel)
    bins = _bins(config)
    positions = _find(config, "max_source_positions")
    return torch.randn(batch, bins, 2 * positions) if positions else torch.randn(batch, FRAMES, bins)


def _bins(config: Any) -> int:
    names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "feature_size")
    return next((found for n in names if (found := _find(config, n))), 80)


def _sound(config: Any, batch: int, length: int, form: Form) -> Tensor:
    return torch.randn(batch, *form.sound)


def _sounds(config: Any) -> list[tuple[int, ...]]:
    """The shapes of audio to try: samples, samples of one channel, a spectrogram."""
    return [(4000,), (1, 4000), (_find(config, "max_length") or FRAMES, _find(config, "num_mel_bins") or 16)]


def _series(config: Any, batch: int, length: int, form: Form) -> Tensor:
    return torch.randn(batch, _find(config, "context_length") or FRAMES, _find(config, "num_input_channels") or 1)


def _task(config: Any, batch: int, length: int, form: Form) -> Tensor:
    return torch.randint(1, 100, (batch, _find(config, "task_seq_len") or 77))


def _patches(config: Any, names: list[str], batch: int) -> Inputs:
    """Images as rows of pixels, with `GRID` by `GRID` patches each."""
    depth = _find(config, "temporal_patch_size") or _find(config, "patch_temporal") or 1
    count = (_find(config, "in_channels") or 3) * depth * _find(config, "patch_size") ** 2
    pixels = next(n for n in names if n != "grid_thw")
    made = {pixels: torch.randn(batch * GRID * GRID, count), "grid_thw": torch.tensor([[1, GRID, GRID]] * batch)}
    return made | ({"merge_sizes": torch.ones(batch, dtype=torch.long)} if "merge_sizes" in names else {})


_MAKERS = {
    "input_ids": _tokens, "decoder_input_ids": _tokens, "pixel_values": _pixels, "pixel_values_videos": _video, "bbox": _boxes,
    "input_features": _mel, "input_values": _sound, "past_values": _series, "task_inputs": _task,
}  # fmt: skip


def _frames(config: Any, batch: int, length: int, form: Form) -> Tensor:
    return torch.ones(batch, FRAMES, dtype=torch.long)


# given only where nothing is accepted without them
_OTHERS = {"input_features_mask": _frames, "qformer_input_ids": _tokens}

"""Kernels and their machine code as bytes for the plan cache, and back. JSON and raw code, no pickle.

The source of a kernel is not stored: it is written again, and compared with a hash of the one that was built. So code of
another version of this package is noticed, and nothing of Triton's compiler is needed to start from what is stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fusewright.toolkit.kernel.ir import Kernel
from fusewright.toolkit.kernel.serial import from_json, to_json
from fusewright_triton.binaries import Binary, Built, Variant
from fusewright_triton.config import Config, Tile
from fusewright_triton.emitter import Source, emit
from fusewright_triton.target import Target

VERSION = 2


@dataclass(frozen=True, slots=True)
class Stored:
    """Kernels and their configurations, by structural hash, and what was built of them. Simulated ones have no code."""

    kernels: Mapping[str, Kernel]
    configs: Mapping[str, Config]
    built: Mapping[tuple[str, Config, Variant], Built]


def pack(target: Target, stored: Stored) -> bytes:
    """Bytes for `unpack`."""
    entries, code = [], []
    for (key, config, variant), b in stored.built.items():
        functions = [[f.name, f.shared, f.threads, len(f.code)] for f in b.binaries]
        entries.append([key, _config_data(config), list(variant), _digest(b.source), functions])
        code += [f.code for f in b.binaries]
    header = {
        "version": VERSION,
        "target": _identity(target),
        "kernels": {key: to_json(k) for key, k in stored.kernels.items()},
        "configs": {key: _config_data(c) for key, c in stored.configs.items()},
        "built": entries,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *code])


def unpack(data: bytes, target: Target) -> Stored:
    """What `pack` was given. ValueError, KeyError or TypeError for what is damaged, of another target or version."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if header["version"] != VERSION or header["target"] != _identity(target):
        raise ValueError("kernels of another version or for another target")
    kernels = {key: from_json(k) for key, k in header["kernels"].items()}
    built = {}
    for key, config_data, variant_data, digest, functions in header["built"]:
        config, variant = _config(config_data), Variant(*variant_data)
        source = emit(kernels[key], config, variant.wide)
        if _digest(source) != digest:
            raise ValueError(f"this version writes another source for {kernels[key].name}")
        binaries = []
        for name, shared, threads, length in functions:
            binaries.append(Binary(name, data[end : end + length], shared, threads))
            end += length
        built[key, config, variant] = Built(kernels[key], config, source, binaries)
    if end != len(data):
        raise ValueError("the code is not as long as it was")
    return Stored(kernels, {key: _config(c) for key, c in header["configs"].items()}, built)


def _identity(target: Target) -> list[Any]:
    return [target.arch, target.triton, target.lanes, [list(o) for o in target.options]]


def _digest(source: Source) -> str:
    return hashlib.sha256(f"{source.warps} {source.text}".encode()).hexdigest()


def _config_data(c: Config) -> list[Any]:
    return [[[list(t.axes), t.block] for t in c.tiles], c.row, c.persistent, c.split, c.warps]


def _config(data: list[Any]) -> Config:
    tiles, row, persistent, split, warps = data
    return Config(tuple(Tile(tuple(axes), block) for axes, block in tiles), row, persistent, split, warps)

"""Serialize kernels and their machine code for the plan cache. JSON and raw code, no pickle.

The source of a kernel is not stored: on loading it is generated again (handwritten source is read) and compared with the hash of
the source that was built. Code of another version of this package is thus noticed, and loading needs nothing of Triton's compiler.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fusewright.toolkit.ir.ir import Kernel
from fusewright.toolkit.ir.serial import from_json, structural_hash, to_json
from fusewright.toolkit.ir.verify import verify
from fusewright_triton.build.binaries import Binary, Built, Variant
from fusewright_triton.emit.emitter import Source, emit
from fusewright_triton.emit.schedule import Config, Tile
from fusewright_triton.run.handwritten import Order, source
from fusewright_triton.target import Target

VERSION = 4


@dataclass(frozen=True, slots=True)
class Stored:
    """Kernels and their configurations, by structural hash, and their binaries; the code of handwritten kernels.
    Simulated kernels have no code."""

    kernels: Mapping[str, Kernel]
    configs: Mapping[str, Config]
    built: Mapping[tuple[str, Config, Variant], Built]
    by_hand: Mapping[Order, Binary] = field(default_factory=dict)


def pack(target: Target, stored: Stored) -> bytes:
    """Return bytes for `unpack`."""
    entries, code = [], []
    for (key, config, variant), b in stored.built.items():
        how = [_config_data(config), list(variant), b.kernel.name]  # the name may be that of an equal kernel
        entries.append([key, *how, _digest(b.source), [_facts(f) for f in b.binaries]])
        code += [f.code for f in b.binaries]
    by_hand = [[_order_data(o), _text_digest(source(o.module)), _facts(f)] for o, f in stored.by_hand.items()]
    code += [f.code for f in stored.by_hand.values()]
    header = {
        "version": VERSION,
        "target": _identity(target),
        "kernels": {key: to_json(k) for key, k in stored.kernels.items()},
        "configs": {key: _config_data(c) for key, c in stored.configs.items()},
        "built": entries,
        "by_hand": by_hand,
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *code])


def unpack(data: bytes, target: Target) -> Stored:
    """Return what `pack` was given. Raise ValueError, KeyError or TypeError for damaged data or another target or version."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    if header["version"] != VERSION or header["target"] != _identity(target):
        raise ValueError("kernels of another version or for another target")
    kernels = {key: _kernel(key, k) for key, k in header["kernels"].items()}
    code, built, by_hand = _Code(data, end), {}, {}
    for key, config_data, variant_data, name, digest, functions in header["built"]:
        config, variant, kernel = _config(config_data), Variant(*variant_data), replace(kernels[key], name=name)
        text = emit(kernel, config, variant.wide)
        if _digest(text) != digest:
            raise ValueError(f"this version writes another source for {name}")
        built[key, config, variant] = Built(kernel, config, text, [code.next(f) for f in functions])
    for order_data, digest, facts in header["by_hand"]:
        order = _order(order_data)
        if _text_digest(source(order.module)) != digest:
            raise ValueError(f"this version has another source of {order.function}")
        by_hand[order] = code.next(facts)
    if code.at != len(data):
        raise ValueError("the code is not as long as it was")
    return Stored(kernels, {key: _config(c) for key, c in header["configs"].items()}, built, by_hand)


def _kernel(key: str, data: dict[str, Any]) -> Kernel:
    """Return a complete kernel that matches its hash: its source is generated again."""
    kernel = from_json(data)
    verify(kernel)
    if structural_hash(kernel) != key:
        raise ValueError(f"{kernel.name} is stored under the hash of another kernel")
    return kernel


@dataclass
class _Code:
    """The concatenated machine code of functions."""

    data: bytes
    at: int

    def next(self, facts: list[Any]) -> Binary:
        name, shared, threads, length, descriptors = facts
        start, self.at = self.at, self.at + length
        return Binary(name, self.data[start : self.at], shared, threads, descriptors=tuple(descriptors))


def _facts(f: Binary) -> list[Any]:
    return [f.name, f.shared, f.threads, len(f.code), list(f.descriptors)]


def _identity(target: Target) -> list[Any]:
    return [target.arch, target.triton, target.lanes, [list(o) for o in target.options]]


def _digest(s: Source) -> str:
    return _text_digest(f"{s.warps} {s.text}")


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _order_data(o: Order) -> list[Any]:
    return [o.module, o.function, list(o.types), [list(c) for c in o.constants], [list(c) for c in o.options]]


def _order(data: list[Any]) -> Order:
    module, function, types, constants, options = data
    if not (isinstance(module, str) and module.isidentifier()):
        raise ValueError(f"{module!r} is no file of kernels")
    return Order(module, function, tuple(types), tuple((k, v) for k, v in constants), tuple((k, v) for k, v in options))


def _config_data(c: Config) -> list[Any]:
    return [[[list(t.axes), t.block] for t in c.tiles], c.row, c.persistent, c.split, c.warps, c.each]


def _config(data: list[Any]) -> Config:
    tiles, row, persistent, split, warps, each = data
    numbers = (row, persistent, split, warps, each, *(n for axes, block in tiles for n in (*axes, block)))
    if not all(isinstance(n, int) for n in numbers):
        raise ValueError("a configuration that is none")
    return Config(tuple(Tile(tuple(axes), block) for axes, block in tiles), row, persistent, split, warps, each)

"""Serialize compiled kernels for the plan cache: object code and the kernels themselves, no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fusewright_cpu.run.jit import images, load_module
from fusewright_cpu.run.launch import Launcher
from fusewright_cpu.run.linker import Linked
from fusewright_cpu.run.sources import Source, from_json, to_json


def pack(kernels: Mapping[str, Source]) -> bytes:
    """Return the code of loaded kernels, by hash. Object code shared with other kernels is included whole."""
    found = images(kernels)
    header = {
        "kernels": {h: to_json(k) for h, k in kernels.items()},
        "images": [{"hashes": list(i.addresses), "symbols": i.imports, "bytes": len(i.code)} for i in found],
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(i.code for i in found)


def unpack(data: bytes) -> dict[str, Launcher]:
    """Link what `pack` returned and return its launchers. Raise ValueError, KeyError or RuntimeError if it does not fit."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    at = 8 + length
    linked: dict[str, Linked] = {}
    for image in header["images"]:
        code = data[at : at + image["bytes"]]
        at += image["bytes"]
        linked.update(load_module(code, image["hashes"], image["symbols"]).linked)
    sources = {h: from_json(k) for h, k in header["kernels"].items()}
    return {h: Launcher(k, linked[h].addresses[h], linked[h]) for h, k in sources.items()}

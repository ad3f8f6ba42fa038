"""Kernels as JSON, and their structural hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from fusewright.sizes.serial import from_data, to_data
from fusewright.toolkit.ir.extent import Extent
from fusewright.toolkit.ir.index import Coefs, DivMod, Index, Indirect
from fusewright.toolkit.ir.ir import Buffer, Kernel, Node, Scalar, Stage

VERSION = 3
"""Bumped whenever the meaning of stored kernels changes."""
HASHED = 2
"""Bumped whenever equal hashes would no longer mean equal kernels."""


def to_json(kernel: Kernel) -> dict[str, Any]:
    """Convert the kernel to JSON data (lists, dicts, ints and strings; floats as hex, so that every bit survives)."""
    return {
        "version": VERSION,
        "name": kernel.name,
        "buffers": [[b.name, b.dtype, b.access] for b in kernel.buffers],
        "symbols": list(kernel.symbols),
        "hints": list(kernel.hints),
        "scalars": [[s.name, s.dtype] for s in kernel.scalars],
        "p": [to_data(e) for e in kernel.p],
        "r": [to_data(e) for e in kernel.r],
        "stages": [[s.over, [_node(n) for n in s.nodes]] for s in kernel.stages],
    }


def from_json(data: dict[str, Any]) -> Kernel:
    """Restore a kernel from `to_json`'s data. Raises ValueError for another version; the caller must verify data
    that it does not trust."""
    if data.get("version") != VERSION:
        raise ValueError(f"a kernel of version {data.get('version')}, this is version {VERSION}")
    p, r = tuple(from_data(e) for e in data["p"]), tuple(from_data(e) for e in data["r"])
    stages = tuple(Stage(over, tuple(_to_node(n, p + r) for n in nodes)) for over, nodes in data["stages"])
    return Kernel(
        data["name"],
        tuple(Buffer(*b) for b in data["buffers"]),
        tuple(Scalar(*s) for s in data["scalars"]),
        p,
        r,
        stages,
        tuple(data["hints"]),
    )


def structural_hash(kernel: Kernel) -> str:
    """SHA-256 (hex) of the kernel's behaviour: stable across processes, independent of names, hints and node numbers."""
    data = {**to_json(canonical(kernel)), "version": HASHED, "hints": []}
    return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()


def canonical(kernel: Kernel) -> Kernel:
    """Replace names by positions: buffers b0.., scalars c0.., nodes numbered in order."""
    ids = {n.id: i for i, n in enumerate(kernel.nodes())}

    def move(n: Node) -> Node:
        index = None if n.index is None else _canonical_index(n.index, ids)
        return replace(n, id=ids[n.id], args=tuple(ids[a] for a in n.args), index=index)

    return replace(
        kernel,
        name="k",
        buffers=tuple(replace(b, name=f"b{i}") for i, b in enumerate(kernel.buffers)),
        scalars=tuple(replace(s, name=f"c{i}") for i, s in enumerate(kernel.scalars)),
        stages=tuple(Stage(s.over, tuple(move(n) for n in s.nodes)) for s in kernel.stages),
    )


def positional(kernel: Kernel) -> Kernel:
    """Like `canonical`, but with the kernel's own name. Code built from it serves every kernel of the same hash, whatever their
    buffers are called. Hints, which are not hashed, are kept."""
    return replace(canonical(kernel), name=kernel.name)


def _canonical_index(ix: Index, ids: dict[int, int]) -> Index:
    if not ix.indirect and len(ix.divmods) < 2:
        return ix
    indirect = sorted((Indirect(i.stride, ids[i.value]) for i in ix.indirect), key=lambda i: i.value)
    return replace(ix, divmods=tuple(sorted(ix.divmods, key=repr)), indirect=tuple(indirect))


def _coefs(c: Coefs) -> list[Any]:
    return [[a, to_data(k)] for a, k in c]


def _index(ix: Index) -> list[Any]:
    divmods = [
        [
            to_data(d.stride),
            to_data(d.offset),
            _coefs(d.coefs),
            to_data(d.div),
            None if d.mod is None else to_data(d.mod),
        ]
        for d in ix.divmods
    ]
    return [
        to_data(ix.offset),
        _coefs(ix.coefs),
        divmods,
        [[to_data(i.stride), i.value] for i in ix.indirect],
    ]


def _to_index(data: list[Any], sizes: tuple[Extent, ...]) -> Index:
    def coefs(c: list[Any]) -> Coefs:
        return tuple((int(a), from_data(k)) for a, k in c)

    offset, main, divmods, indirect = data
    return Index(
        from_data(offset),
        coefs(main),
        tuple(
            DivMod(from_data(s), from_data(o), coefs(c), from_data(d), None if m is None else from_data(m))
            for s, o, c, d, m in divmods
        ),
        tuple(Indirect(from_data(s), int(v)) for s, v in indirect),
        sizes,
    )


def _node(n: Node) -> dict[str, Any]:
    out: dict[str, Any] = {"id": n.id, "op": n.op, "dtype": n.dtype}
    if n.args:
        out["args"] = list(n.args)
    if n.index is not None:
        out["index"] = _index(n.index)
    if n.buffer is not None:
        out["buffer"] = n.buffer
    if n.how:
        out["how"] = n.how
    if n.value is not None:
        out["value"] = n.value.hex() if isinstance(n.value, float) else n.value
    if n.extent is not None:
        out["extent"] = to_data(n.extent)
    if n.keep:
        out["keep"] = True
    if n.says:
        out["says"] = n.says
    return out


def _to_node(d: dict[str, Any], sizes: tuple[Extent, ...]) -> Node:
    value = d.get("value")
    return Node(
        d["id"],
        d["op"],
        d["dtype"],
        tuple(d.get("args", ())),
        _to_index(d["index"], sizes) if "index" in d else None,
        d.get("buffer"),
        d.get("how", ""),
        float.fromhex(value) if isinstance(value, str) else value,
        from_data(d["extent"]) if "extent" in d else None,
        d.get("keep", False),
        d.get("says", ""),
    )

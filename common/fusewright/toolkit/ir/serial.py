"""Kernels as JSON, and their structural hash."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

from fusewright.toolkit.ir.extent import Extent, Poly, rename
from fusewright.toolkit.ir.index import Coefs, DivMod, Index, Indirect
from fusewright.toolkit.ir.ir import Buffer, Kernel, Node, Scalar, Stage

VERSION = 2
"""Changes whenever the meaning of stored kernels changes."""


def to_json(kernel: Kernel) -> dict[str, Any]:
    """The kernel as JSON data (lists, dicts, ints and strings; floats as hex, so that every bit survives)."""
    return {
        "version": VERSION,
        "name": kernel.name,
        "buffers": [[b.name, b.dtype, b.access] for b in kernel.buffers],
        "symbols": list(kernel.symbols),
        "hints": list(kernel.hints),
        "scalars": [[s.name, s.dtype] for s in kernel.scalars],
        "p": [_extent(e) for e in kernel.p],
        "r": [_extent(e) for e in kernel.r],
        "stages": [[s.over, [_node(n) for n in s.nodes]] for s in kernel.stages],
    }


def from_json(data: dict[str, Any]) -> Kernel:
    """The kernel that `to_json` described. ValueError for another version; the caller verifies data that it
    does not trust."""
    if data.get("version") != VERSION:
        raise ValueError(f"a kernel of version {data.get('version')}, this is version {VERSION}")
    p, r = tuple(_to_extent(e) for e in data["p"]), tuple(_to_extent(e) for e in data["r"])
    stages = tuple(Stage(over, tuple(_to_node(n, p + r) for n in nodes)) for over, nodes in data["stages"])
    return Kernel(
        data["name"],
        tuple(Buffer(*b) for b in data["buffers"]),
        tuple(data["symbols"]),
        tuple(Scalar(*s) for s in data["scalars"]),
        p,
        r,
        stages,
        tuple(data["hints"]),
    )


def structural_hash(kernel: Kernel) -> str:
    """SHA-256 (hex) of what the kernel does: equal in every process, independent of all names, hints and
    node numbers."""
    data = to_json(canonical(kernel))
    return hashlib.sha256(json.dumps(data, separators=(",", ":")).encode()).hexdigest()


def canonical(kernel: Kernel) -> Kernel:
    """The kernel with positions for names: buffers b0.., symbols s0.., nodes numbered in order, no hints."""
    names = {s: f"s{i}" for i, s in enumerate(kernel.symbols)}
    ids = {n.id: i for i, n in enumerate(kernel.nodes())}
    sizes = tuple(rename(e, names) for e in kernel.sizes)

    def move(n: Node) -> Node:
        return replace(
            n,
            id=ids[n.id],
            args=tuple(ids[a] for a in n.args),
            index=None if n.index is None else _rename_index(n.index, names, ids, sizes),
            extent=None if n.extent is None else rename(n.extent, names),
        )

    return Kernel(
        "k",
        tuple(replace(b, name=f"b{i}") for i, b in enumerate(kernel.buffers)),
        tuple(names[s] for s in kernel.symbols),
        tuple(replace(s, name=f"c{i}") for i, s in enumerate(kernel.scalars)),
        sizes[: len(kernel.p)],
        sizes[len(kernel.p) :],
        tuple(Stage(s.over, tuple(move(n) for n in s.nodes)) for s in kernel.stages),
    )


def positional(kernel: Kernel) -> Kernel:
    """The kernel as kernels of its hash have in common, under its own name: what is made of it serves all of them, whatever
    they call their symbols. Its hints stay, which no hash knows."""
    return replace(canonical(kernel), name=kernel.name, hints=kernel.hints)


def _rename_index(ix: Index, names: dict[str, str], ids: dict[int, int], sizes: tuple[Extent, ...]) -> Index:
    def coefs(c: Coefs) -> Coefs:
        return tuple((a, rename(k, names)) for a, k in c)

    divmods = [
        DivMod(
            rename(d.stride, names),
            rename(d.offset, names),
            coefs(d.coefs),
            rename(d.div, names),
            None if d.mod is None else rename(d.mod, names),
        )
        for d in ix.divmods
    ]
    indirect = [Indirect(rename(i.stride, names), ids[i.value]) for i in ix.indirect]
    return Index(
        rename(ix.offset, names),
        coefs(ix.coefs),
        tuple(sorted(divmods, key=repr)),
        tuple(sorted(indirect, key=lambda i: i.value)),
        sizes,
    )


def _extent(e: Extent) -> Any:
    return e if not isinstance(e, Poly) else [[list(m), c] for m, c in e.terms]


def _to_extent(data: Any) -> Extent:
    if isinstance(data, int):
        return data
    return Poly(tuple((tuple(m), int(c)) for m, c in data))


def _coefs(c: Coefs) -> list[Any]:
    return [[a, _extent(k)] for a, k in c]


def _index(ix: Index) -> list[Any]:
    divmods = [
        [
            _extent(d.stride),
            _extent(d.offset),
            _coefs(d.coefs),
            _extent(d.div),
            None if d.mod is None else _extent(d.mod),
        ]
        for d in ix.divmods
    ]
    return [
        _extent(ix.offset),
        _coefs(ix.coefs),
        divmods,
        [[_extent(i.stride), i.value] for i in ix.indirect],
    ]


def _to_index(data: list[Any], sizes: tuple[Extent, ...]) -> Index:
    def coefs(c: list[Any]) -> Coefs:
        return tuple((int(a), _to_extent(k)) for a, k in c)

    offset, main, divmods, indirect = data
    return Index(
        _to_extent(offset),
        coefs(main),
        tuple(
            DivMod(_to_extent(s), _to_extent(o), coefs(c), _to_extent(d), None if m is None else _to_extent(m))
            for s, o, c, d, m in divmods
        ),
        tuple(Indirect(_to_extent(s), int(v)) for s, v in indirect),
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
        out["extent"] = _extent(n.extent)
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
        _to_extent(d["extent"]) if "extent" in d else None,
        d.get("keep", False),
        d.get("says", ""),
    )

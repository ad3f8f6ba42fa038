"""Kernels that differ only in the names of their symbols share built code, in the process and on disk."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

import torch

from fusewright.toolkit.ir import Builder, Kernel, structural_hash, symbol
from fusewright.toolkit.ir.serial import from_json, positional, to_json
from fusewright_triton import runtime, target
from fusewright_triton.autotune import _key
from fusewright_triton.backend import TritonLoader
from fusewright_triton.build.binaries import Binary, Built, Variant, Wanted
from fusewright_triton.emit.emitter import emit
from fusewright_triton.emit.schedule import choose
from fusewright_triton.run import archive
from fusewright_triton.runtime import compile_kernels, library, unpack_kernels
from tests.backends.triton.kernels import column_sum, softmax
from tests.backends.triton.run.test_launch import Recorder, recorder  # noqa: F401 (a fixture)

H100 = target.NVIDIA["sm_90"]


def transposed(rows: str, columns: str, name: str = "transposed", hint: int = 4096) -> Kernel:
    """Return a transposing copy of [rows, columns] with a division in its index: sizes decide grid, masks and addresses."""
    n, m = symbol(rows), symbol(columns)
    b = Builder(name, p=[n, m], symbols={rows: hint, columns: hint})
    x, out = b.input("x", "f32"), b.output("out", "f32")
    i, j = b.axes
    b.store(out, j * n + i, b.load(x, (i * m + j) // m * m + j))
    return b.build()


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> list[Wanted]:
    """Replace the compiler by one that only records its orders. The process's kernels are cleared before and after."""
    asked: list[Wanted] = []

    def ask(orders: Sequence[Wanted], t: target.Target, code: Any) -> list[Future[Built]]:
        asked.extend(orders)
        answers = [Future[Built]() for _ in orders]
        for answer, o in zip(answers, orders, strict=True):
            binaries = [Binary(f.name, b"1", 64, 128) for f in o.source().functions]
            answer.set_result(Built(o.kernel, o.config, o.source(), binaries))
        return answers

    monkeypatch.setattr(runtime, "ask", ask)
    monkeypatch.setattr(Recorder, "load", lambda self, code, name, shared: 1)
    library.cache_clear()
    yield asked  # type: ignore[misc]
    library.cache_clear()


def launched(call: Any, recorder: Recorder, *sizes: int) -> tuple[Any, ...]:  # noqa: F811
    recorder.types = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32]
    call([torch.zeros(sizes), torch.zeros(sizes)], sizes)
    return (*recorder.launches[-1][:2], recorder.launches[-1][-1][2:])


def test_one_is_built_and_both_are_launched(recorder: Recorder, built: list[Wanted]) -> None:  # noqa: F811
    """Two models in one process: `s53` of one is `s7` of the other, and each variant is built once."""
    first, second = transposed("s53", "s27"), transposed("s7", "s91", "copied")
    assert structural_hash(first) == structural_hash(second)
    codes = [TritonLoader(H100)({structural_hash(k): k}) for k in (first, second)]
    results = [launched(c[structural_hash(first)].call, recorder, 4096, 512) for c in codes]
    assert results[0] == results[1] and results[0][-1] == [4096, 512]
    wide = [launched(c[structural_hash(first)].call, recorder, 100, 7) for c in codes]
    assert wide[0] == wide[1] != results[0]
    assert len({o.variant for o in built}) == len(built), "another variant, never the same again"


def test_what_was_stored_under_other_names_is_launched(recorder: Recorder) -> None:  # noqa: F811
    """The cached plan uses earlier names and the process already has the kernel under new ones; and the other way round."""
    first, second = transposed("s53", "s27"), transposed("s7", "s91")
    key = structural_hash(first)
    loader = TritonLoader(H100)
    loader({key: first})
    data = loader.pack({key: first})
    assert data is not None
    library.cache_clear()
    compile_kernels([second], H100)
    stored = unpack_kernels(data, H100).by_hash(key)
    library.cache_clear()
    alone = unpack_kernels(data, H100).by_hash(key)
    fresh = compile_kernels([second], H100).launcher(second)
    assert launched(stored, recorder, 640, 48) == launched(alone, recorder, 640, 48) == launched(fresh, recorder, 640, 48)


def test_code_that_another_graph_has_built_is_stored_with_a_plan() -> None:
    """Loading compares sources: the stored source must be that of the stored kernel."""
    first, second = transposed("s53", "s27"), transposed("s7", "s91", "copied")
    key = structural_hash(first)
    TritonLoader(H100)({key: first})
    loader = TritonLoader(H100)
    loader({key: second})
    data = loader.pack({key: second})
    assert data is not None and list(archive.unpack(data, H100).built) == [(key, choose(second, H100), Variant(even=True))]


def test_a_kernel_under_the_hash_of_another_is_refused() -> None:
    stored = archive.Stored({structural_hash(softmax()): column_sum(64, 70)}, {}, {})
    with pytest.raises(ValueError, match="under the hash of another kernel"):
        archive.unpack(archive.pack(H100, stored), H100)


def test_positions_stand_for_names_and_nothing_else_changes() -> None:
    first, second = transposed("s53", "s27"), transposed("s7", "s91")
    named = positional(first)
    assert named == positional(second) and named.symbols == range(2)
    assert (named.name, named.hints) == (first.name, first.hints) and structural_hash(named) == structural_hash(first)
    config = choose(first, H100)
    texts = {emit(k, config, False).text for k in (named, positional(second), from_json(to_json(named)))}
    assert len(texts) == 1, "whether it was just made or comes from the disk"


def test_sizes_that_were_seen_choose_how_and_are_kept_apart() -> None:
    """The hash ignores size hints but the formula uses them: the second kernel does not get the first one's configuration."""
    few, many = (replace(softmax(symbol("n"), symbol("m")), hints=h) for h in ((4, 131072), (65536, 64)))
    assert structural_hash(few) == structural_hash(many) and choose(few, H100) != choose(many, H100)
    for k in (few, many, few):
        assert library(H100).config(structural_hash(k), k) == choose(k, H100)


def test_a_measured_choice_is_remembered_without_names() -> None:
    first, second = transposed("s53", "s27"), transposed("s7", "s91")
    assert _key("hash", first, H100) == _key("hash", second, H100)
    assert _key("hash", first, H100) != _key("hash", transposed("s53", "s27", hint=512), H100)


def test_a_name_in_what_is_stored_is_that_of_a_position() -> None:
    kernel = transposed("s53", "s27")
    loader = TritonLoader(H100)
    loader({structural_hash(kernel): kernel})
    data = loader.pack({structural_hash(kernel): kernel})
    assert data is not None
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert [k["symbols"] for k in header["kernels"].values()] == [[0, 1]]

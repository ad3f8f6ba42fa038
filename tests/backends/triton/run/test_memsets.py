"""Memset nodes of captured graphs: which are replaced, and that a replay still writes the same values."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator

import pytest
import torch

from fusewright_triton.run import memsets
from fusewright_triton.run.driver import driver
from fusewright_triton.run.memsets import Memset, words_of


@pytest.mark.parametrize(
    ("memset", "words"),
    [
        (Memset(1024, 0, 0, 1, 4096, 1), (0, 1024)),
        (Memset(1024, 0, 0xAB, 1, 8, 1), (0xABABABAB, 2)),
        (Memset(1024, 0, 0x1234, 2, 2, 1), (0x12341234, 1)),
        (Memset(1024, 0, 0xFFFFFFFF, 4, 3, 1), (0xFFFFFFFF, 3)),
        (Memset(1024, 0, 0, 1, 7, 1), None),  # not a whole number of words
        (Memset(1026, 0, 0, 2, 8, 1), None),  # not aligned to a word
        (Memset(1024, 64, 0, 4, 8, 2), None),  # rows with gaps
        (Memset(1024, 0, 0, 4, 0, 1), None),
    ],
)
def test_what_is_a_fill_of_words(memset: Memset, words: tuple[int, int] | None) -> None:
    assert words_of(memset) == words


OPS = {
    "mov": lambda a: a, "cvta": lambda a: a, "cvt": lambda a: a & 0xFFFFFFFF, "sub": lambda a, b: a - b, "shl": lambda a, b: a << b,
    "mad": lambda a, b, c: a * b + c, "mul": lambda a, b: a * b, "add": lambda a, b: a + b, "and": lambda a, b: a & b,
}  # fmt: skip
TESTS = {"ge": int.__ge__, "lt": int.__lt__, "ne": int.__ne__}


class Thread:
    """Runs the kernel's PTX for one thread and yields the words that it stores, as (address, value)."""

    def __init__(self, block: int, thread: int, **params: int) -> None:
        self.params = params
        self.values = {"%ctaid.x": block, "%ntid.x": memsets.THREADS, "%tid.x": thread}

    def value(self, text: str) -> int:
        return self.values[text] if text.startswith("%") else int(text)

    def stores(self) -> Iterator[tuple[int, int]]:
        body = memsets.FILL.decode().partition("{")[2].rpartition("}")[0]
        lines = [x for x in map(str.strip, re.split(r";|(?<=:)\n", body)) if x and not x.startswith(".reg")]
        at = 0
        while at < len(lines):
            guard, op, rest = re.fullmatch(r"(?:@(%p\d) )?([\w.:]+) ?(.*)", lines[at], re.DOTALL).groups()  # type: ignore[union-attr]
            name, *kind = op.split(".")
            args = re.findall(r"[%\w.+]+", rest)
            at += 1
            if (guard and not self.values[guard]) or op.endswith(":"):
                continue
            if name == "ret":
                return
            if name == "bra":
                at = lines.index(f"{args[0]}:")
            elif name == "ld":
                self.values[args[0]] = self.params[args[1]]
            elif name == "setp":
                found = TESTS[kind[0]](*map(self.value, args[1:3]))
                self.values[args[0]] = found or (kind[1] == "or" and self.values[args[3]])
            elif name == "st":
                base, _, offset = args[0].partition("+")
                assert len(args) == (5 if "v4" in kind else 2)
                assert "v4" not in kind or self.value(base) % 16 == 0
                yield from ((self.value(base) + int(offset or 0) + 4 * k, self.value(a)) for k, a in enumerate(args[1:]))
            else:
                self.values[args[0]] = OPS[name](*map(self.value, args[1:]))


@pytest.mark.parametrize("start", [4096, 4100, 4104])
@pytest.mark.parametrize("words", [1, 3, 4, 5, 1023, 1026])
def test_every_word_is_stored_once(start: int, words: int) -> None:
    (grid, *_), (block, *_) = memsets.dims(words)
    threads = (Thread(b, t, start=start, word=7, words=words) for b in range(grid) for t in range(block))
    stored = [s for thread in threads for s in thread.stores()]
    assert sorted(stored) == [(start + 4 * k, 7) for k in range(words)]


@pytest.mark.hardware("nvidia_triton")
def test_a_replay_writes_what_it_wrote_before() -> None:
    x = torch.ones(4096, dtype=torch.int32, device="cuda")
    seen = torch.empty(7, 4096, dtype=torch.int32, device="cuda")
    lib, at = driver("cuda").lib, x.data_ptr()

    def steps() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for k, (name, start, *args) in enumerate((
            ("cuMemsetD32Async", at, 0, ctypes.c_size_t(4096)),
            ("cuMemsetD8Async", at + 16, 0xAB, ctypes.c_size_t(1000)),
            ("cuMemsetD16Async", at + 64, 0x1234, ctypes.c_size_t(1)),
            ("cuMemsetD8Async", at + 3, 7, ctypes.c_size_t(5)),
            ("cuMemsetD32Async", at + 4, 5, ctypes.c_size_t(1030)),
            ("cuMemsetD2D32Async", at, ctypes.c_size_t(64), 9, ctypes.c_size_t(3), ctypes.c_size_t(5)),
        )):  # fmt: skip
            assert getattr(lib, name)(ctypes.c_uint64(start), *args, stream) == 0
            seen[k].copy_(x)
            x.add_(1)
        seen[6].copy_(x)

    for replaced in (False, True):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            steps()
        if replaced:
            assert memsets.as_kernels(graph.raw_cuda_graph(), torch.cuda.current_device()) == 3
        graph.instantiate()
        x.fill_(1)
        seen.zero_()
        graph.replay()
        if not replaced:
            wanted = seen.clone()
    assert torch.equal(seen, wanted) and wanted.any()

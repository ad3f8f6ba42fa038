"""Memset nodes of captured graphs: which are replaced, and that a replay still writes the same values."""

from __future__ import annotations

import ctypes

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


@pytest.mark.hardware("nvidia_triton")
def test_a_replay_writes_what_it_wrote_before() -> None:
    x = torch.ones(4096, dtype=torch.int32, device="cuda")
    seen = torch.empty(6, 4096, dtype=torch.int32, device="cuda")
    lib, at = driver("cuda").lib, x.data_ptr()

    def steps() -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        for k, (name, start, *args) in enumerate((
            ("cuMemsetD32Async", at, 0, ctypes.c_size_t(4096)),
            ("cuMemsetD8Async", at + 16, 0xAB, ctypes.c_size_t(1000)),
            ("cuMemsetD16Async", at + 64, 0x1234, ctypes.c_size_t(1)),
            ("cuMemsetD8Async", at + 3, 7, ctypes.c_size_t(5)),
            ("cuMemsetD2D32Async", at, ctypes.c_size_t(64), 9, ctypes.c_size_t(3), ctypes.c_size_t(5)),
        )):  # fmt: skip
            assert getattr(lib, name)(ctypes.c_uint64(start), *args, stream) == 0
            seen[k].copy_(x)
            x.add_(1)
        seen[5].copy_(x)

    for replaced in (False, True):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            steps()
        if replaced:
            assert memsets.as_kernels(graph.raw_cuda_graph(), torch.cuda.current_device()) == 2
        graph.instantiate()
        x.fill_(1)
        seen.zero_()
        graph.replay()
        if not replaced:
            wanted = seen.clone()
    assert torch.equal(seen, wanted) and wanted.any()

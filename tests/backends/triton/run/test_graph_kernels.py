"""Which words of captured kernels' arguments are addresses of results. The driver that describes the kernels is a fake."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusewright.interface import Number
from fusewright_triton.run import graph_kernels, memsets
from fusewright_triton.run.graph_kernels import Captured, Unknown, joined, naming, note, taking
from fusewright_triton.run.memsets import KernelParameters

SIZE = 64
FIRST, SECOND = (torch.empty(SIZE, dtype=torch.uint8) for _ in range(2))
MOVED = [torch.empty(SIZE, dtype=torch.uint8) for _ in range(2)]


def kernel(*arguments: bytes, code: bytes = b"code") -> Captured:
    return Captured(5, code, arguments)


def word(value: int | torch.Tensor, distance: int = 0) -> bytes:
    return struct.pack("Q", (value if isinstance(value, int) else value.data_ptr()) + distance)


def test_words_that_move_with_a_result_are_addresses_in_it() -> None:
    """A size, a descriptor of two words and an address inside of the second result."""
    mine = kernel(b"\7\0\0\0", word(FIRST) + word(9), word(SECOND, 16))
    theirs = kernel(b"\7\0\0\0", word(MOVED[0]) + word(9), word(MOVED[1], 16))
    (node,) = naming([FIRST, SECOND], [mine], MOVED, [theirs])
    assert node.places == (0, 64, 128) and node.patches == ((64, 0, 0), (128, 1, 16))
    assert node.arguments[64:80] == word(FIRST) + word(9) and node.pointer_at == KernelParameters.params.offset


def test_kernels_that_name_no_result_keep_their_arguments() -> None:
    other = kernel(word(7))
    (node,) = naming([FIRST], [other, kernel(word(FIRST))], MOVED[:1], [other, kernel(word(MOVED[0]))])
    assert node.patches == ((0, 0, 0),)


@pytest.mark.parametrize(
    ("mine", "theirs", "why"),
    [
        (kernel(word(FIRST)), kernel(word(MOVED[0], 8)), "more than the addresses"),
        (kernel(word(FIRST, SIZE)), kernel(word(MOVED[0], SIZE)), "more than the addresses"),  # behind the result
        (kernel(word(FIRST) + word(3)), kernel(word(MOVED[0]) + word(4)), "more than the addresses"),
        (kernel(b"\1\0\0\0"), kernel(b"\2\0\0\0"), "more than the addresses"),  # half a word
        (kernel(word(FIRST)), kernel(word(MOVED[0]), code=b"other"), "from one capture to the next"),
        (kernel(word(FIRST)), kernel(word(MOVED[0]), word(1)), "from one capture to the next"),
        (kernel(word(1)), kernel(word(1)), "no kernel names a result"),  # a table in memory may hold the address
    ],
)
def test_any_other_difference_is_unknown(mine: Captured, theirs: Captured, why: str) -> None:
    with pytest.raises(Unknown, match=why):
        naming([FIRST], [mine], MOVED[:1], [theirs])


class Driver:
    """A capture of the nodes 1, 2, 3, one behind another: a kernel with its arguments one by one, a memset, and a kernel with them
    in a block, whose size comes first."""

    def __init__(self) -> None:
        self.before: dict[int, list[int]] = {1: [], 2: [1], 3: [2]}
        self.block = ctypes.create_string_buffer(struct.pack("IxxxxQ", 6, 7))
        one, two = ctypes.c_uint32(6), ctypes.c_uint64(7)
        self.count = ctypes.c_size_t(16)
        self.array = (ctypes.c_void_p * 2)(ctypes.addressof(one), ctypes.addressof(two))
        words = 2, ctypes.addressof(self.count), graph_kernels.BUFFER, ctypes.addressof(self.block), 0, 0, 0, 0
        self.extra = (ctypes.c_uint64 * 8)(*words)
        self.held = one, two
        self.lib = SimpleNamespace(**{name: name for name in (
            "cuGraphNodeGetType", "cuGraphMemsetNodeGetParams", "cuGraphKernelNodeGetParams_v2"
        )}, cuFuncGetParamInfo=self.argument)  # fmt: skip

    def call(self, what: str, name: str, node: ctypes.c_void_p, told: Any) -> None:
        of, to = int(node.value or 0), told._obj
        if name == "cuGraphNodeGetType":
            to.value = memsets.MEMSET if of == 2 else graph_kernels.KERNEL
        elif name == "cuGraphKernelNodeGetParams_v2":
            to.function = 40 + of
            (to.params, to.extra) = (
                (ctypes.addressof(self.array), None) if of == 1 else (None, ctypes.addressof(self.extra))
            )

    def argument(self, function: Any, k: Any, offset: Any, size: Any) -> int:
        if k.value < 2:
            offset._obj.value, size._obj.value = [(0, 4), (8, 8)][k.value]
        return 0 if k.value < 2 else graph_kernels.NO_ARGUMENT


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    for module in (graph_kernels, memsets):
        monkeypatch.setattr(module, "driver", lambda kind: made)
    monkeypatch.setattr(graph_kernels, "here", lambda: 3)
    monkeypatch.setattr(graph_kernels, "listed", lambda name, of: made.before[of])
    return made


def test_a_capture_is_read_in_its_order_with_the_bytes_of_each_argument(driver: Driver) -> None:
    kernels = graph_kernels.captured_since(0)
    assert [k.node for k in kernels] == [1, 2, 3]
    assert kernels[0].arguments == kernels[2].arguments == (struct.pack("I", 6), struct.pack("Q", 7))
    assert kernels[1].arguments == () and kernels[0].parameters != kernels[2].parameters
    assert [k.node for k in graph_kernels.captured_since(1)] == [2, 3]


def test_what_was_captured_last_takes_numbers(driver: Driver) -> None:
    first, second, unused = Number(6), Number(7), Number(8)
    note({0: first}, 100)
    note({0: first, 1: second}, 50)
    nodes, ranges = taking({4: first, 2: second, 9: unused}, 3)
    assert ranges == [(4, 50), (2, 50), (9, graph_kernels.MOST_NUMBER)]
    (node,) = joined(nodes)
    assert node.node == 3 and node.places == (0, 64) and set(node.patches) == {(0, 3, 0), (64, 4, 0)}
    assert node.arguments[:8] == struct.pack("II", 6, 0), "a number of half a word is set as a word"


def test_a_kernel_that_does_not_have_the_number_is_unknown(driver: Driver) -> None:
    with pytest.raises(Unknown, match="not in the order"):
        note({1: Number(6)}, 100)
    with pytest.raises(RuntimeError, match="how many programs"):
        note({0: Number(6)}, -1)


def test_what_is_not_one_line_of_known_kernels_is_unknown(driver: Driver) -> None:
    with pytest.raises(Unknown, match="side by side"):
        graph_kernels.captured_since(7)
    driver.before[3] = [1, 2]
    with pytest.raises(Unknown, match="side by side"):
        graph_kernels.captured_since(0)
    driver.extra[2] = driver.extra[0] = 0
    with pytest.raises(Unknown, match="neither one by one nor in a block"):
        graph_kernels.captured_since(2)
    del driver.lib.cuFuncGetParamInfo
    with pytest.raises(Unknown, match="older than cuFuncGetParamInfo"):
        graph_kernels.captured_since(2)

"""A transposed convolution of fp32 channels-last images: `out = after(conv_transpose(x, weight) (+ bias) (+ other))`.

Pixels of the result whose places leave the same remainders when divided by the strides, a phase, see the same taps: each phase is a
convolution of stride 1 with every stride-th tap in reverse order, whose pixels lie apart. A work item computes panels of several
phases for the same windows. The sizes `ky`, `kx` and `k` are those of the largest phase, `oh`, `ow` and `m` those of any (strides
divide the size of the result), and `whole_y` and `whole_x` are those of the window. There is no dilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from fusewright_cpu.emit.text import Fn, Module, V, i64
from fusewright_cpu.kernels.by_hand import DirectConv
from fusewright_cpu.kernels.direct_conv import WORDS, Pixels
from fusewright_cpu.kernels.panels import emit_panels
from fusewright_cpu.kernels.parts import most, word

REVERSED = (4, 6)
"""The dimensions of taps, once phases are apart."""


def taps(window: tuple[int, int], stride: tuple[int, int]) -> tuple[int, int]:
    """Return the taps of the largest phase."""
    return -(-window[0] // stride[0]), -(-window[1] // stride[1])


def packing(shape: tuple[int, ...], groups: int, stride: tuple[int, int], columns: int) -> tuple[tuple[int, ...], ...]:
    """Return how a weight [groups * c, n, ky, kx] is packed: the padding of the window and of n with zeros, the shape with groups,
    panels and phases apart, and the order in memory of phases, groups, panels, taps, c and columns."""
    channels, n, *window = shape
    (sy, sx), (ty, tx) = stride, taps((window[0], window[1]), stride)
    pad = (0, tx * sx - window[1], 0, ty * sy - window[0], 0, -n % columns)
    apart = (groups, channels // groups, -(-n // columns), columns, ty, sy, tx, sx)
    return pad, apart, (5, 7, 0, 2, 4, 6, 1, 3)


def packed(weight: torch.Tensor, groups: int, stride: tuple[int, int], columns: int) -> torch.Tensor:
    """Pack a weight."""
    pad, apart, order = packing(tuple(weight.shape), groups, stride, columns)
    return torch.nn.functional.pad(weight, pad).reshape(apart).flip(REVERSED).permute(order).contiguous()


def emit_transposed_conv(module: Module, a: DirectConv, name: str, parallel: bool) -> None:
    """Add the function `name` (see `emit_panels`)."""
    emit_panels(module, a, name, parallel, _Phases(module, a, f"{name}.body"))


class _Phases(Pixels):
    """The pixels of all phases as rows. The last word of a window is where its pixel is in the result, in the first phase."""

    words = WORDS + 1

    def count(self, f: Fn, size: Mapping[str, V]) -> V:
        return f.mul(super().count(f, size), self._phases(f, size))

    def width(self, f: Fn, size: Mapping[str, V]) -> V:
        return f.mul(super().width(f, size), self._phases(f, size))

    def _phases(self, f: Fn, size: Mapping[str, V]) -> V:
        return f.mul(size["stride_y"], size["stride_x"])

    def _of_phase(self) -> V:
        """Return the panels of a phase."""
        return self.f.mul(self.per_group, self.size["groups"])

    def group(self, panel: V) -> V:
        return self.f.bin("sdiv", self.f.bin("srem", panel, self._of_phase()), self.per_group)

    def window_of(self, image: V, y: V, x: V) -> tuple[V, ...]:
        f, size = self.f, self.size
        line = f.mul(f.add(f.mul(image, size["oh"]), y), size["stride_y"])
        pixel = f.mul(f.add(f.mul(line, size["ow"]), x), size["stride_x"])
        return y, x, self.where(image, y, x), f.mul(pixel, self._channels())

    def _channels(self) -> V:
        return self.f.mul(self.size["n"], self.size["groups"])

    def use(self, panel: V) -> None:
        """Note where the windows of this panel's phase begin, its first tap, and where its pixels are from the first phase's."""
        f, size = self.f, self.size
        super().use(panel)
        phase = f.bin("sdiv", panel, self._of_phase())
        tops = {"y": f.bin("sdiv", phase, size["stride_x"]), "x": f.bin("srem", phase, size["stride_x"])}
        self.shift, self.least, place = {}, {}, {}
        for axis, tap in tops.items():
            stride, padding, window = (size[f"{name}_{axis}"] for name in ("stride", "pad", "whole"))
            far = f.bin("sub", f.add(tap, stride), f.bin("srem", padding, stride))
            place[axis] = f.bin("srem", far, stride)
            last = f.bin("sub", size[f"k{axis}"], i64(1))
            self.shift[axis] = f.bin("sub", f.bin("sdiv", f.add(place[axis], padding), stride), last)
            short = f.cmp("icmp sge", f.add(tap, f.mul(last, stride)), window)
            self.least[axis] = f.select(short, i64(1), i64(0))
        line = f.mul(place["y"], f.mul(size["ow"], size["stride_x"]))
        self.place_of_phase = f.mul(f.add(line, place["x"]), self._channels())

    def offset(self, tap: V, axis: str) -> V:
        return self.f.add(tap, self.shift[axis])

    def of_row(self, y: V | None, body: Callable[[], None]) -> None:
        if y is None:
            return body()

        def inside() -> list[V]:
            body()
            return []

        last = self.f.bin("sub", self.f.add(y, self.tall), i64(1))
        self.f.when(self.f.cmp("icmp sge", last, self.least["y"]), inside)
        return None

    def first_tap(self, x: V) -> V:
        return most(self.f, x, self.least["x"])

    def first_row(self, y: V) -> V:
        return most(self.f, y, self.least["y"])

    def reach(self, at: V, axis: str) -> tuple[V, V]:
        """Of all phases together."""
        f, size = self.f, self.size
        stride = size[f"stride_{axis}"]
        ahead = f.bin("sdiv", f.bin("sub", f.add(stride, size[f"pad_{axis}"]), i64(1)), stride)
        return f.bin("sub", at, f.bin("sub", size[f"k{axis}"], i64(1))), f.add(at, ahead)

    def start_of(self, row: V, i: V, apart: V) -> V:
        f = self.f
        window = f.mul(f.add(f.bin("sub", row, self.first), i), i64(self.words))
        return f.add(word(f, f.gep("i64", self.windows, window), WORDS), self.place_of_phase)

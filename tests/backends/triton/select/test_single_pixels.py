"""Convolutions of single pixels with an activation are products with an epilogue."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install './backends/triton[simulate]'")

from tests.backends.triton.select.test_calls import Net, check, lowered, text


@pytest.fixture(autouse=True)
def small(thresholds: object) -> None:
    thresholds(product_rows=1, product_results=1)  # type: ignore[operator]


@pytest.mark.parametrize("activation", ["gelu", "silu", "sigmoid"])
@pytest.mark.parametrize("norm", [True, False])
def test_the_activation_is_an_epilogue(norm: bool, activation: str) -> None:
    g = Net()
    y = g.conv(g.images(2, 8, 6, 5), 8, 16, 1, bias=True)
    out = g.op(activation, g.norm(y, 16) if norm else y)
    fragment = check(g, [out])
    assert [t for t in text(fragment) if "linear_activation" in t and activation in t]
    assert not [t for t in text(fragment) if "convolution" in t]


@pytest.mark.parametrize(("kernel", "more"), [(3, {}), (1, {"stride": (2, 2)}), (1, {"padding": (1, 1)}), (1, {"groups": 2})])
def test_others_stay(kernel: int, more: dict[str, object]) -> None:
    g = Net()
    fragment = lowered(g, [g.op("silu", g.conv(g.images(2, 8, 6, 5), 8, 16, kernel, **more))])
    assert [t for t in text(fragment) if "convolution" in t]


def test_an_activation_that_a_kernel_reads_stays_there() -> None:
    g = Net()
    made = g.op("silu", g.conv(g.images(2, 8, 6, 5), 8, 8, 1))
    fragment = check(g, [g.op("mean", made, (2, 3), True)])
    assert [t for t in text(fragment) if "convolution" in t]


def test_images_in_planes() -> None:
    g = Net()
    fragment = check(g, [g.op("gelu", g.conv(g.tensor(2, 8, 6, 5), 8, 16, 1))])
    assert [t for t in text(fragment) if "linear_activation" in t]

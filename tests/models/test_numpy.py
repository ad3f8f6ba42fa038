"""NumPy functions through `torch.compile`: arrays in, arrays out, the values of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fusewright import registry
from fusewright.bench.cases.graphs import nearest_centroid

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(not registry.info("x86_onednn").available, reason="x86_onednn does not run here"),
]
Array = np.ndarray[Any, Any]
random = np.random.default_rng(0)


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="x86_onednn")


@pytest.mark.parametrize("dims", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("count", [2, 7, 19])
def test_nearest_centroid(dims: int, count: int) -> None:
    points = random.standard_normal((1037, dims), dtype=np.float32)
    centroids = random.standard_normal((count, dims), dtype=np.float32)
    wanted, got = nearest_centroid(points, centroids), compiled(nearest_centroid)(points, centroids)
    assert got.dtype == wanted.dtype
    distances = np.linalg.norm(points[:, None].astype(np.float64) - centroids, axis=2)
    rows = np.arange(len(points))
    np.testing.assert_allclose(distances[rows, got], distances[rows, wanted], rtol=1e-6)


def test_first_of_equals_and_nan_as_in_numpy() -> None:
    points = np.array([[0, 0], [1, 1], [np.nan, 0]], np.float32)
    centroids = np.array([[1, 0], [0, 1], [2, 2]], np.float32)
    np.testing.assert_array_equal(compiled(nearest_centroid)(points, centroids), nearest_centroid(points, centroids))


def test_standardise() -> None:
    def standardise(x: Array) -> Array:
        return (x - np.mean(x, axis=0)) / np.sqrt(np.var(x, axis=0) + np.float32(1e-6))

    x = random.standard_normal((500, 6), dtype=np.float32)
    np.testing.assert_allclose(compiled(standardise)(x), standardise(x), rtol=2e-5, atol=2e-6)

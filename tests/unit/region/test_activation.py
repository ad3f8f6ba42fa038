"""Formulas of activations are looked for in time that grows with the region, not with its square."""

from __future__ import annotations

import torch

from fusewright.interface import RuleLog
from fusewright.toolkit.region.activation import name_activations
from fusewright.toolkit.region.graph import RegionGraph
from tests.fragments import Sketch
from tests.growth import work


def curves_of_one_value(count: int) -> RegionGraph:
    """A region that returns tanh(k * x) for many k, as a table of frequencies does."""
    s = Sketch()
    x = s.input(torch.randn(4))
    return RegionGraph(s.region([s.op("tanh", s.op("mul", x, float(k))) for k in range(count)]))


def test_curves_of_one_value_share_the_search() -> None:
    few, many = (curves_of_one_value(n) for n in (20, 80))
    name_activations(RegionGraph(few.region()), RuleLog())
    assert work(lambda: name_activations(many, RuleLog())) < 5 * work(lambda: name_activations(few, RuleLog()))

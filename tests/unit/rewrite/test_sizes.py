"""Rewrites of graphs with symbolic sizes hold for every size that the guards admit: nothing would check another assumption."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fusewright import _torch_compat as compat
from fusewright import report
from fusewright.graph import retrace
from fusewright.graph.canonicalize import canonicalize
from fusewright.rewrite.engine import Env, Rewriter, Rule, p

aten = torch.ops.aten


def traced() -> tuple[Graph, Any]:
    """A graph of windows of six rows in an image of symbolic sides, and its ShapeEnv."""

    def windows(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 8).exp().view(x.shape[0] * x.shape[1] // 6, 6, 8)

    gm = make_fx(windows, tracing_mode="symbolic")(torch.randn(9, 4, 8))
    assert canonicalize(gm.graph) == []
    return gm.graph, compat.shape_env_of(gm)


def test_unflattening_the_rows_of_a_linear_asks_nothing_of_the_sizes() -> None:
    """Tracing that view asked which side of the image the windows divide: a graph for each answer, none of them checked."""
    linear = torch.nn.Linear(8, 16)

    def fn(x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0] * x.shape[1]
        return linear(x.reshape(rows, 8)).view(rows // 6, 6, 16)

    torch.compiler.reset()
    compiled = torch.compile(fn, backend="fusewright_null", dynamic=True, options={"strict": True, "cache": False})
    with torch.no_grad(), report.recording() as reports:
        for sides in ((4, 6), (9, 4), (6, 6)):
            x = torch.randn(*sides, 8)
            assert torch.equal(compiled(x), fn(x))
    assert len(reports) == 1 and reports[0].rules["linear.view"]


def test_a_rewrite_whose_result_depends_on_sizes_is_refused() -> None:
    graph, env = traced()

    def windows_first(r: Rewriter, node: Node, found: Env) -> Node:
        whole = found["x"].args[0]
        return r.call("exp", (r.call("view", (whole, found["sizes"])),))

    before, guards = [n.target for n in graph.nodes], len(env.guards)
    hits = Rewriter(graph).run([Rule("windows.first", p("view", p("exp", "x"), "sizes"), windows_first, "")])
    assert not hits and len(env.guards) == guards and [n.target for n in graph.nodes] == before


def test_mended_strides_change_no_guards() -> None:
    """Whether rows of columns have a view depends on the sizes. It becomes a reshape, or stays until the first run tells."""
    gm = make_fx(lambda x: x.view(x.shape[0], -1, 6, 8).exp(), tracing_mode="symbolic")(torch.randn(9, 12, 8))
    env = compat.shape_env_of(gm)
    guards = len(env.guards)
    retrace.mend(gm.graph, next(iter(gm.graph.nodes)), torch.empty(12, 9, 8).transpose(0, 1))
    assert len(env.guards) == guards, env.guards[guards:]


def test_a_question_about_sizes_is_refused_each_time() -> None:
    """Torch remembers its answers: one that it had given the first time would be given without a guard the second."""
    graph, env = traced()
    image = next(n.meta["val"] for n in graph.nodes if n.op == "placeholder")
    guards = len(env.guards)
    for _ in range(2):
        with pytest.raises(compat.SizesAssumed), compat.assuming_nothing(image):
            bool(image.shape[0] * image.shape[1] > 17)
    with compat.assuming_nothing(image):
        assert image.shape[0] > 1, "which its guards say"
    assert len(env.guards) == guards


def test_a_refused_question_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Torch's rule for `complex` asks for sizes as numbers; its log would show a traceback to users, though nothing is wrong."""
    graph, _ = traced()
    image = next(n.meta["val"] for n in graph.nodes if n.op == "placeholder")
    with compat.fake_mode_of(image), compat.assuming_nothing(image), pytest.raises(compat.SizesAssumed):
        torch.complex(image, image)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]

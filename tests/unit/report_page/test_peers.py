"""Attribution of kernel times to source lines."""

from __future__ import annotations

import pytest

from fusewright.report_page.peers import Piece, grouped, inductor

TRACE = '  File "model.py", line {}, in forward\n    y = f(x)'


def test_lines_that_a_kernel_of_ours_joins_are_one_group() -> None:
    ours = [Piece("norm", ("m.py:1", "m.py:2"), 3.0), Piece("linear", ("m.py:3",), 4.0)]
    groups = grouped(ours, {"eager": [Piece("add", ("m.py:1",), 1.0), Piece("norm", ("m.py:2",), 5.0)]})
    by_lines = {tuple(g.lines): g.seconds for g in groups}
    assert by_lines == {("m.py:1", "m.py:2"): {"ours": 3.0, "eager": 6.0}, ("m.py:3",): {"ours": 4.0}}


def test_a_kernel_of_another_is_shared_out_as_eager_spends_its_time() -> None:
    ours = [Piece("a", ("m.py:1",), 1.0), Piece("b", ("m.py:2",), 1.0)]
    eager = [Piece("a", ("m.py:1",), 3.0), Piece("b", ("m.py:2",), 1.0)]
    groups = grouped(ours, {"eager": eager, "inductor": [Piece("fused", ("m.py:1", "m.py:2"), 2.0)]})
    assert {g.lines[0]: g.seconds["inductor"] for g in groups} == pytest.approx({"m.py:1": 1.5, "m.py:2": 0.5})


def test_no_time_is_lost() -> None:
    ours = [Piece("views", (), 0.5), Piece("a", ("m.py:1", "m.py:4"), 1.0)]
    others = {"eager": [Piece("x", ("m.py:9",), 2.0), Piece("y", (), 1.0)]}
    groups = grouped(ours, others)
    assert sum(g.seconds.get("ours", 0) for g in groups) == 1.5
    assert sum(g.seconds.get("eager", 0) for g in groups) == 3.0


def test_the_nth_run_of_a_name_is_the_nth_kernel_that_was_told_of() -> None:
    names = ("extern_kernels.addmm:1", "cpp_fused_gelu_0:2", "extern_kernels.addmm:3")
    told = {name: [TRACE.format(line)] for name, line in zip(names, (7, 8, 9), strict=True)}
    call = [("aten::addmm", 1.0), ("graph_0_cpp_fused_gelu_0", 2.0), ("aten::addmm", 3.0), ("aten::copy_", 4.0)]
    found = {(p.name, p.lines): p.seconds for p in inductor([call, call], [told], rounds=2)}
    assert found == {
        ("aten::addmm", ("model.py:7",)): 1.0, ("cpp_fused_gelu_0", ("model.py:8",)): 2.0,
        ("aten::addmm", ("model.py:9",)): 3.0, ("aten::copy_", ()): 4.0,
    }  # fmt: skip

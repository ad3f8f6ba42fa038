"""Profilers see each instruction of a plan with its ops and source line; without a profiler there is no overhead."""

from __future__ import annotations

import dis
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph

from fusewright import _torch_compat as compat
from fusewright.graph.view import source_line
from fusewright.plan import labels
from fusewright.plan.execute import codegen
from tests.unit.plan.replay import test_inference as test_replay
from tests.unit.plan.test_vocabulary import GOOD


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.nn.functional.gelu(self.norm(y) + x)


def ranges(call: Callable[[], Any]) -> list[str]:
    """The names with our prefix, in the order of a profile."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return [e.name for e in profile.events() if e.name.startswith("fusewright ")]


def line_of(text: str) -> str:
    """The location of the line with this text in this file, formatted as in labels."""
    lines = Path(__file__).read_text().splitlines()
    return f"test_profile.py:{1 + next(k for k, line in enumerate(lines) if text in line)}"


@pytest.fixture(autouse=True)
def _reset() -> None:
    torch._dynamo.reset()


def test_a_kernel_and_a_library_call_show_their_line() -> None:
    model, x = Mlp().eval(), torch.randn(4, 16)
    fn = test_replay.compiled(model, test_replay.Recorder())
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(test_replay.Backend, "recorder", lambda self: None)
        before = fn(x), fn(x)
        seen = ranges(lambda: fn(x))
        assert torch.equal(fn(x), before[1])
    assert any("linear" in s and line_of("y = self.linear(x)") in s for s in seen), seen
    kernels = [s for s in seen if s.endswith("(kernel)")]
    assert kernels and any("layer_norm" in s for s in kernels) and all("test_profile.py:" in s for s in kernels), seen


def test_a_replay_shows_what_was_compiled_and_how_much_of_it() -> None:
    fn, x = test_replay.compiled(test_replay.Small().eval(), test_replay.Recorder()), torch.randn(4, 8)
    with torch.no_grad():
        for _ in range(3):
            fn(x)
    seen = [s for s in ranges(lambda: fn(x)) if s.startswith("fusewright replay")]
    assert len(seen) == 1 and re.fullmatch(r"fusewright replay Small test_inference.py:\d+, \d+ instructions", seen[0]), (
        seen
    )


def test_a_plan_asks_for_a_profiler_by_one_look_and_writes_no_range_before() -> None:
    run, text = codegen.load(GOOD), codegen.to_text(GOOD)
    assert "profile" not in text  # the text that `explain` prints
    code = list(dis.get_instructions(run))
    assert not any(i.opname.endswith("_WITH") for i in code)
    asked = [i.argval for i in code if i.opname in ("LOAD_GLOBAL", "LOAD_CONST")][:2]
    assert asked == ["profiling", compat.PROFILING]
    assert type(run.__globals__["profiling"]) is type("".join)  # no Python is called
    assert run([torch.tensor(-1.0)]) == (torch.tensor(0.0),)


def test_an_instruction_without_an_origin_still_has_a_name() -> None:
    assert labels.labeler(GOOD)(GOOD.instructions[0]) == "fusewright (aten::relu)"


def test_the_line_is_the_last_frame_and_not_a_line_of_the_program_that_looks_like_one() -> None:
    node = Graph().placeholder("x")
    node.meta["stack_trace"] = (
        '  File "/a/m.py", line 3, in forward\n    y = f(x)\n  File "/a/n.py", line 12, in f\n    print(\'File "x"\')\n'
    )
    assert source_line(node) == "n.py:12"


def test_a_stored_origin_takes_the_line_of_the_graph_at_hand() -> None:
    graph = Graph()
    graph.placeholder("x").meta["stack_trace"] = '  File "/b/new.py", line 7, in forward\n'
    stored = {3: labels.Origin("gelu", 0), 4: labels.Origin("add", 99), 5: labels.Origin("add", None)}
    assert [o.line for o in labels.with_lines(stored, graph).values()] == ["new.py:7", "", ""]


def first(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).relu() + 1  # of the first


def second(x: torch.Tensor) -> torch.Tensor:
    return (x * 3).relu() + 1  # of the second


@pytest.mark.hardware("x86_onednn")
def test_a_plan_from_the_cache_is_traced_logged_and_shows_the_lines_of_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.INFO, "fusewright")
    traced: dict[str, str] = {}
    monkeypatch.setattr(compat, "trace_artifact", lambda name, text: traced.__setitem__(name, text()))
    x = torch.randn(8, 512)
    for fn in (first, second):
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="x86_onednn")
        traced.clear()
        with torch.no_grad():
            compiled(x), compiled(x)
        assert "def run(args)" in traced["fusewright_plan"]
        shown = ranges(lambda: compiled(x))  # noqa: B023
        assert shown and all(line_of(f"# of the {fn.__name__}") in s for s in shown), shown
    assert [m for m in caplog.messages if "infer graph of first test_profile.py" in m]
    assert [m for m in caplog.messages if "plan of second test_profile.py" in m and "from the cache" in m]

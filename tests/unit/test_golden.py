"""Small programs at each stage of the pipeline, as text: traced, simplified, planned, and the plan's kernels."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path

import pytest
from torch.fx import GraphModule

from fusewright import pipeline, report
from fusewright.config import Options
from fusewright.graph.parser import parse
from fusewright.interface import Device, DevicePolicy, KernelCode, Phase
from fusewright.toolkit.backend.fused import FusedBackend
from fusewright.toolkit.ir import Kernel
from fusewright.toolkit.ir.printer import to_text
from tests import golden

OPTIONS = Options(cache=False, fallback="allow", strict=True)
GRADIENTS = "tangents_1"
"""The name of an input that marks a backward graph."""


class Kernels(FusedBackend):
    """Only loop kernels and an arena, so that results are the same on every machine."""

    name, device_type = "kernels_only", "cpu"
    texts: list[str]

    @classmethod
    def probe(cls) -> Device:
        return Device("cpu", "any")

    def policy(self) -> DevicePolicy:
        return DevicePolicy(arena=64)

    def load(self, kernels: Mapping[str, Kernel]) -> Mapping[str, KernelCode]:
        self.texts = [to_text(kernel) for kernel in kernels.values()]
        return super().load(kernels)


def compiled(text: str) -> list[str]:
    """Return the simplified graph, the plan and its kernels. Inputs named w... are weights."""
    gm, backend = GraphModule({}, parse(text)), Kernels()
    backend.texts = []
    inputs = gm.graph.find_nodes(op="placeholder")
    weights = frozenset(n for n in inputs if str(n.target).startswith("w"))
    phase: Phase = "backward" if GRADIENTS in {str(n.target) for n in inputs} else "infer"
    with report.recording() as reports:
        pipeline.compile_graph(backend, OPTIONS, gm, phase, weights, "direct")
    texts = reports[0].texts
    return [texts["simplify"], numbered(texts["plan"]), *backend.texts]


def numbered(plan: str) -> str:
    """Renumber launches from 0; in the generated code their numbers depend on how many names precede them."""
    numbers = count()
    return re.sub(r"\blaunch_\d+", lambda _: f"launch_{next(numbers)}", plan)


@pytest.mark.parametrize("name", golden.names("program"))
def test_each_stage_gives_the_expected_text(name: str, goldens: golden.Goldens) -> None:
    program = golden.read(name)[0]
    goldens.check(name, program, *compiled(program))


# ---------------------------------------------------------------- the mechanism


def accepting(folder: Path, accept: bool) -> tuple[golden.Goldens, list[Path]]:
    accepted: list[Path] = []
    return golden.Goldens(accept, accepted.append, folder), accepted


def test_a_text_that_differs_fails_with_the_difference(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("a\n----\nb\n")
    goldens, _ = accepting(tmp_path, accept=False)
    goldens.check("x", "a", "b")
    with pytest.raises(AssertionError, match=r"--accept(.|\n)*-b\n\+c"):
        goldens.check("x", "a", "c")


def test_a_missing_file_fails(tmp_path: Path) -> None:
    goldens, _ = accepting(tmp_path, accept=False)
    with pytest.raises(AssertionError, match=r"new\.txt differs"):
        goldens.check("new", "a")


def test_accepting_rewrites_what_differs_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "same.txt").write_text("a\n")
    (tmp_path / "other.txt").write_text("a\n")
    goldens, accepted = accepting(tmp_path, accept=True)
    for name in ("same", "other", "new"):
        goldens.check(name, "a" if name == "same" else "b")
    assert [p.stem for p in accepted] == ["other", "new"]
    assert (tmp_path / "other.txt").read_text() == (tmp_path / "new.txt").read_text() == "b\n"


def test_every_golden_is_short_enough_to_read() -> None:
    long = {p.name: n for p in golden.FOLDER.iterdir() if (n := len(p.read_text().splitlines())) > 120}
    assert not long

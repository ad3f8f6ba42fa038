"""The benchmark of docs/libraries.md runs the page's lines, and its record becomes the page's table."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch

from ci.bench import libraries
from ci.bench.libraries import Call, Case, Site
from ci.docs import results
from fusewright.bench import report
from fusewright.bench.contenders import EAGER, Contender, from_backend
from fusewright.bench.steady import Row, Settings

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
QUICK = Settings(size="small", seconds=0.01, warm_seconds=0.01, min_rounds=2, max_rounds=2)


def contenders() -> list[Contender]:
    return [EAGER, from_backend("aot_eager"), from_backend("fusewright_null")]


def case(site: Site) -> Call:
    model = site.in_place(libraries._Net(8, 1))
    return lambda: model(torch.ones(2, 8))


def ignored(site: Site) -> Call:
    """A library that does not call the compiled function."""
    model = torch.nn.Linear(8, 8)
    site.in_place(torch.nn.Sequential(model))
    return lambda: model(torch.ones(2, 8))


def measured(make: Case | None = None) -> Row:
    return libraries.measure(make or Case("a library", "torch", case), contenders(), QUICK)


def test_every_block_of_the_page_is_measured() -> None:
    source = inspect.getsource(libraries)
    assert all(f'"{title}"' in source for title in libraries.blocks())


def test_a_block_is_run_with_another_backends_name() -> None:
    model = torch.nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="no_such_backend"):
        libraries.run(libraries.IN_PLACE, "no_such_backend", model=model)


def test_a_row_holds_every_contender_beside_eager() -> None:
    row = measured()
    assert [e.get("reason", "ok") for e in row["contenders"].values()] == ["ok"] * 3
    assert all(len(e["steady"]["rounds_ms"]) >= 2 for e in row["contenders"].values())
    assert row["contenders"]["eager"]["speedup"] == 1.0


def test_a_library_that_does_not_call_what_was_compiled_is_a_failure() -> None:
    found = measured(Case("ignores it", "torch", ignored))["contenders"]
    assert found["fusewright_null"]["status"] == "failed" and "nothing was compiled" in found["fusewright_null"]["reason"]


def test_a_library_that_is_not_here_is_a_row_that_says_so() -> None:
    found = measured(Case("absent", "no_such_library", case))["contenders"]
    assert {e["status"] for e in found.values()} == {"unavailable"}
    assert "pip install '.[libraries]'" in found["eager"]["reason"]


def test_the_newest_record_becomes_the_table(tmp_path: Path) -> None:
    assert results.newest("libraries", tmp_path) == ""
    document = report.new_document(["x"], "fusewright_null", {"threads": 1})
    for day, name in (("2026-01-02", "later"), ("2026-01-01", "earlier")):
        document["rows"] = [{**measured(), "model": name}]
        (tmp_path / f"{day}-x86-libraries.json").write_text(json.dumps(document))
    text = results.newest("libraries", tmp_path)
    assert "later" in text and "earlier" not in text and "2026-01-02" in text and "over eager" in text

"""`fusewright cache`: lists the content in lines that fit a terminal, without changing anything."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from fusewright.cache import seal, store
from fusewright.cache.store import Key
from fusewright.cli.cache import cache
from tests.unit.cache.graphs import affine, compiled, folder, names
from tests.unit.cache.test_folder import mode, posix

X = torch.randn(5)
pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.hardware("x86_onednn")]


def run(*args: str, columns: int = 80) -> Result:
    done = CliRunner(env={"COLUMNS": str(columns)}).invoke(cache, args)
    assert done.exit_code == 0, done.output
    return done


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


@torch.no_grad()
def test_the_list_shows_model_graph_backend_size_age_and_hits() -> None:
    model = Small().eval()
    for _ in range(3):
        compiled(model)(X)
    compiled(affine)(X)
    (small, function) = run("list").output.splitlines()[1:3]
    assert small.split()[:2] == ["Small", f"test_command.py:{line_of('self.layer(x).relu()')}"] and "x86_onednn" in small
    assert function.startswith("affine graphs.py:")
    assert small.split()[-2] == "2" and function.split()[-2] == "0"  # hits
    (row, _) = json.loads(run("list", "--json").output)["plans"]
    assert row["ops"] > 1 and row["hits"] == 2 and row["phase"] == "infer" and row["bytes"] > 1000 and 0 <= row["age"] < 600
    assert {row["plan"], _["plan"]} == set(names())


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(k for k, line in enumerate(lines, 1) if text in line)


def test_the_list_fits_into_eighty_columns_and_a_pipe() -> None:
    model = "AVeryLongNameOfAModelForImageSegmentation modeling_image_segmentation.py:1234"
    facts = {"model": model, "ops": 12345, "backend": "nvidia_triton"}
    store.write(Key({"phase": "infer"}), facts, {}, b"x" * 10_000_000, 1 << 30)
    lines = run("list").output.splitlines()
    assert all(len(line) <= 80 for line in lines[:-1]), lines
    assert "12345" in lines[1] and "nvidia_triton" in lines[1] and "10000" in lines[1]


def test_what_is_not_ours_is_listed_without_its_words() -> None:
    """A foreign name could contain terminal escape codes."""
    key = Key({"phase": "infer"})
    store.write(key, {"model": "\x1b[2Jred [bold]x[/bold]", "ops": 1, "backend": "b"}, {}, b"", 1 << 30)
    assert "\x1b" not in run("list").output and "[bold]x" in run("list").output
    raw = folder().read(f"{key.name}.plan")
    folder().write(f"{key.name}.plan", raw[:-1] + b"\x00" if raw[-1:] != b"\x00" else raw[:-1])
    assert "red" not in run("list").output and "?" in run("list").output


@posix
@pytest.mark.parametrize("command", ["size", "list", "clear"])
def test_looking_makes_and_changes_nothing(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the command ran `chmod 0700` on whatever FUSEWRIGHT_CACHE_DIR named."""
    run(command)
    assert list(tmp_path.iterdir()) == []
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "summer.plan").write_bytes(b"1")
    shared.chmod(0o1777)
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(shared))
    run(command)
    assert mode(shared) == 0o1777 and [p.name for p in shared.iterdir()] == ["summer.plan"]


def test_clear_removes_plans_choices_hits_and_unfinished_files() -> None:
    for _ in range(2):
        compiled(affine)(X)
    folder().write("choices", seal.seal("choices", b"{}"))
    (folder().path / f".{names()[0]}.plan.99.{'0' * 16}.tmp").write_bytes(b"1")
    assert "1 plan removed" in run("clear").output
    assert [f.name for f in folder().files() if not f.name.endswith(".lock")] == []
    assert run("size").output.startswith("0 plans, 0.00 MB in ")


def test_without_a_home_directory_the_commands_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", "~nobody-of-this-name/x")
    assert "nowhere" in run("size").output


@pytest.mark.parametrize("made", [0, 59, 3600, 86400 * 3])
def test_ages_are_readable(made: float) -> None:
    from fusewright.cli.cache import _age

    assert _age(made) == {0: "0 s", 59: "59 s", 3600: "60 min", 86400 * 3: "3 d"}[made]


def test_the_cache_may_lie_where_nothing_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", os.devnull)
    assert "0 plans" in run("size").output

"""Files of saved programs: written and read whatever others do in the same folder, and in other processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright.aot import file, identity
from fusewright.errors import ArtifactError

X = torch.ones(2, 4)


def _save(path: Path) -> str:
    return fusewright.save(nn.Linear(4, 4).eval(), path, X, backend="fusewright_null")


def test_a_link_planted_for_the_unfinished_file_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("secrets.token_hex", lambda n: "guessed")
    (tmp_path / ".m.guessed.part").symlink_to(victim)
    (tmp_path / "m.part").symlink_to(victim)
    with pytest.raises(ArtifactError, match="m cannot be written: File exists"):
        _save(tmp_path / "m")
    assert victim.read_text() == "precious"


def test_what_cannot_be_written_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(ArtifactError, match="folder cannot be written: Is a directory"):
        _save(tmp_path / "folder")
    with pytest.raises(ArtifactError, match="cannot be written: No such file or directory"):
        _save(tmp_path / "nowhere" / "m")
    monkeypatch.setattr(Path, "replace", lambda self, to: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ArtifactError, match="m cannot be written: No space left on device"):
        _save(tmp_path / "m")
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_long_name_is_written(tmp_path: Path) -> None:
    _save(tmp_path / ("n" * 250))
    assert fusewright.load(nn.Linear(4, 4).eval(), tmp_path / ("n" * 250))(X).shape == (2, 4)


@pytest.mark.skipif(os.name != "posix", reason="no pipes and devices in the file system; runs on POSIX")
def test_what_is_no_plain_file_is_refused_at_once(tmp_path: Path) -> None:
    """A read of the pipe would wait for a writer, and one of /dev/zero would fill the memory."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ArtifactError, match=r"no plain file|Is a directory"):
            fusewright.load(nn.Linear(4, 4).eval(), path)


def test_savers_of_one_path_do_not_mix_their_files(tmp_path: Path) -> None:
    bodies = [{"a": k} for k in range(4)]

    def write(head: dict[str, Any]) -> None:
        for _ in range(20):
            file.write(tmp_path / "m", head, [bytes([head["a"]]) * 100_000])

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(write, b) for b in bodies]
        while not all(r.done() for r in running):
            if (tmp_path / "m").exists():
                head, (blob,) = file.read(tmp_path / "m", None)
                assert blob == bytes([head["a"]]) * 100_000
        assert not any(r.exception() for r in running)
    assert os.listdir(tmp_path) == ["m"]


def test_code_of_other_files_that_ran_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "fw_helper.py").write_text("def twice(x):\n    return x * 2\n")
    (tmp_path / "fw_model.py").write_text(
        "import torch\n\nclass M(torch.nn.Module):\n    def forward(self, x):\n"
        "        from fw_helper import twice\n        return twice(x)\n"
    )
    made = importlib.import_module("fw_model").M().eval()
    fusewright.save(made, tmp_path / "m", X, backend="fusewright_null")
    torch.testing.assert_close(fusewright.load(made, tmp_path / "m")(X), X * 2)
    monkeypatch.delitem(sys.modules, "fw_helper")
    fusewright.load(made, tmp_path / "m")
    assert "fw_helper" not in sys.modules, "comparing a file imports nothing"
    (tmp_path / "fw_helper.py").write_text("def twice(x):\n    return x * 3\n")
    with pytest.raises(ArtifactError, match="files: fw_helper was"):
        fusewright.load(made, tmp_path / "m")


def test_a_file_that_is_named_in_a_file_is_found_without_an_import() -> None:
    assert identity.files_of(["json.tool"])["json.tool"]
    assert "json.tool" not in sys.modules
    assert identity.files_of(["..etc.passwd", "no_such.module", ""]) == {"..etc.passwd": "", "no_such.module": "", "": ""}


_PROGRAM = """
import enum, functools, sys, torch, fusewright
from dataclasses import dataclass, field
class Kind(enum.Enum):
    A = 1
@dataclass
class Config:
    names: set = field(default_factory=lambda: set("abcdefgh"))
    kind: Kind = Kind.A
class M(torch.nn.Module):
    def __init__(self, k):
        super().__init__()
        self.config, self.f, self.t = Config(), lambda x: x * k, torch.arange(4.0)
        self.p, self.s = functools.partial(torch.add, other=1), {"a", "b", "c", ("d", 1)}
        self.table = {f"w{i}": i for i in range(100)}
    def forward(self, x):
        return self.p(self.f(x)) + self.t + (len("x") if "x" in {"x", "y"} else 0)
m, x = M(2.0).eval(), torch.ones(4)
if sys.argv[1] == "save":
    fusewright.save(m, sys.argv[2], x, backend="fusewright_null")
torch.testing.assert_close(fusewright.load(m, sys.argv[2])(x), m(x))
try:
    fusewright.load(M(3.0).eval(), sys.argv[2])
except fusewright.errors.ArtifactError as e:
    assert "f was " in str(e), e
else:
    raise AssertionError("the function multiplies by another number")
"""


@pytest.mark.slow
def test_an_equal_model_of_another_process_is_equal(tmp_path: Path) -> None:
    """Sets have another order there, and everything lies at another address."""
    (tmp_path / "program.py").write_text(_PROGRAM)
    for seed, what in enumerate(("save", "load")):
        given = [sys.executable, str(tmp_path / "program.py"), what, str(tmp_path / "m")]
        done = subprocess.run(given, env={**os.environ, "PYTHONHASHSEED": str(seed + 1)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

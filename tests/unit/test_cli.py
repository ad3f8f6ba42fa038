"""The command line as a whole: help, plurals, exit codes, and messages about files that are not models."""

from __future__ import annotations

import errno
import json
import os
import pydoc
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import fusewright
from fusewright import cli
from fusewright.cli import app, checks
from fusewright.errors import FusewrightError, counted


def commands() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(app.app)
    for name in app.COMMANDS:
        command = app.app.get_command(context, name)
        assert command is not None
        inner = command.commands.items() if isinstance(command, click.Group) else ()
        yield from ((name, command), *((f"{name} {n}", c) for n, c in inner))


def test_every_command_and_option_has_its_help() -> None:
    for name, command in commands():
        assert command.help, name
        missing = [p.name for p in command.params if isinstance(p, click.Option) and not p.help]
        assert not missing, (name, missing)


def test_plurals() -> None:
    assert [counted(n, "graph break") for n in (0, 1, 2)] == ["0 graph breaks", "1 graph break", "2 graph breaks"]


def test_names_are_printed_as_they_are() -> None:
    """Rich would print the model `file.py:train: ...` with an emoji."""
    texts = "\n".join(p.read_text() for p in Path(app.__file__).parent.glob("*.py"))
    printing = [c for c in re.findall(r"Console\(.*", texts) if not c.startswith("Console().is_terminal")]
    assert printing and all(c.startswith("Console(emoji=False") for c in printing)


def test_no_text_spells_a_plural_without_looking_at_the_number() -> None:
    texts = "\n".join(p.read_text() for p in Path(app.__file__).parent.glob("*.py"))
    found = re.findall(r"\{[^{}]*\} (?:graphs|plans|regions|breaks|recompiles|products|kernels|threads|cores)\b", texts)
    assert not found, found


def test_help_of_the_package_shows_what_is_public() -> None:
    text = pydoc.render_doc(fusewright, renderer=pydoc.plaintext)
    for word in ('backend="fusewright"', "fusewright.errors", "fusewright.interface", *fusewright.__all__):
        assert word in text
    assert all(getattr(fusewright, name).__doc__ for name in fusewright.__all__ if name != "__version__")
    public = {
        n for n, v in vars(fusewright).items() if getattr(v, "__module__", "") == "fusewright" and not n.startswith("_")
    }
    assert public <= set(fusewright.__all__)


# ---------------------------------------------------------------- exit codes


class Wrapped(Exception):
    """Wraps an error as `torch.compile` wraps those of a backend."""

    def __init__(self, inner_exception: Exception) -> None:
        self.inner_exception = inner_exception


def ended(monkeypatch: pytest.MonkeyPatch, error: BaseException | None, *args: str) -> Any:
    """Return the exit code of a command that raises `error`."""

    def raising(**_: Any) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(sys, "argv", ["fusewright", *args])
    if error is not None:
        monkeypatch.setattr(app.app.get_command(click.Context(app.app), "config"), "callback", raising)
    with pytest.raises(SystemExit) as e:
        cli.main()
    return e.value.code or 0


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (FusewrightError("no"), 2, "fusewright: no"),
        (click.UsageError("bad"), 2, "bad"),
        (Wrapped(FusewrightError("no")), 2, "fusewright: no"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "cannot write a file: No space left on device"),
    ],
)
def test_an_error_has_its_exit_code_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, says: str
) -> None:
    assert ended(monkeypatch, error, "config") == code
    said = capsys.readouterr().err
    assert says in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "code"), [(("--version",), 0), (("--help",), 0), (("cnfig",), 2), (("config", "--jsn"), 2)]
)
def test_usage_has_its_exit_code(monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], code: int) -> None:
    assert ended(monkeypatch, None, *args) == code


def test_what_ends_a_job_ends_it_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(**_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(sys, "argv", ["fusewright", "config"])
    monkeypatch.setattr(app.app.get_command(click.Context(app.app), "config"), "callback", killed)
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 128 + signal.SIGTERM and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# ---------------------------------------------------------------- a model of one's own

OWN = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop = torch.nn.Linear(8, 4), torch.nn.Dropout(0.5)
    def forward(self, x):
        return self.drop(self.a(x).relu())

def net():
    return Net(), (torch.ones(2, 8),)

def number():
    return 3

def raises():
    return Net(), (torch.ones(2, 8),), missing

def asks(x):
    return x
"""
FILES = {
    "own.py": OWN,
    "syntax.py": "def net(:\n    pass\n",
    "imports.py": "import torch\nimport no_such_module_here\n",
    "stops.py": "x = 1\nraise ValueError('no weights\\nfound')\n",
}


def explained(tmp_path: Path, what: str, *args: str) -> Result:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return CliRunner().invoke(app.app, ["explain", str(tmp_path / what), *args])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("syntax.py:net", "syntax.py:1: syntax error, invalid syntax: def net(:"),
        ("imports.py:net", "imports.py:2 raised ModuleNotFoundError: No module named 'no_such_module_here'"),
        ("stops.py:net", "stops.py:2 raised ValueError: no weights"),
        ("own.py:nett", "own.py has no function 'nett'; did you mean 'net'?"),
        ("own.py:number", "number() must return (module or function, args) or (..., args, kwargs); it returned int"),
        ("own.py:raises", "own.py:18 raised NameError: name 'missing' is not defined"),
        ("own.py:asks", "own.py raised TypeError: asks() missing 1 required positional argument"),
        ("own.py", "name its function too"),
        ("none.py:net", "there is no file"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path: Path, what: str, says: str) -> None:
    error = explained(tmp_path, what, "--backend", "fusewright_interp").exception
    assert isinstance(error, FusewrightError)
    assert says in str(error) and "\n" not in str(error)


def test_a_step_of_ones_own_model_is_explained_and_judged_and_written_to_a_file(tmp_path: Path) -> None:
    torch_reset()
    file = tmp_path / "out.json"
    args = ("--backend", "fusewright_interp", "--train", "--accuracy", "--output", str(file))
    done = explained(tmp_path, "own.py:net", *args)
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(file.read_text())
    assert {g["phase"] for g in found["graphs"]} == {"forward", "backward"} and found["accuracy"]["passed"]


def test_the_folder_of_the_output_is_looked_at_first(tmp_path: Path) -> None:
    done = explained(tmp_path, "own.py:net", "--output", str(tmp_path / "none" / "out.json"))
    assert done.exit_code == 2 and "there is no folder" in done.output


def torch_reset() -> None:
    import torch

    torch._dynamo.reset()


# ---------------------------------------------------------------- platforms


@pytest.mark.parametrize(
    ("system", "libc", "says"),
    [
        ("win32", "", "WSL 2"),
        ("darwin", "", "one thread"),
        ("linux", "musl", "glibc"),
        ("linux", "", ""),
        ("linux2", "", ""),
    ],
)
def test_a_platform_that_was_never_tried_is_told_in_one_line(system: str, libc: str, says: str) -> None:
    line = checks.platform_remark(system, libc)
    assert says in line and "\n" not in line and bool(line) == bool(says)


def test_doctor_prints_that_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "libc", lambda: "musl")
    done = CliRunner().invoke(app.app, ["doctor", "--no-smoke"])
    assert "torch has no wheels for it" in done.output

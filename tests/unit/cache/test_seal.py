"""Files are sealed with the user's own key: files not written by this user on this machine do not open."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from fusewright.cache import place, seal
from fusewright.cache.folder import Folder
from tests.unit.cache.test_folder import STRANGER, posix

MAKE_KEY = "from fusewright.cache import seal; print(seal.name_of('x'), flush=True)"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def another_process() -> None:
    """Reset state as in a new process, which has not read the key yet."""
    seal._keys.clear()


def test_what_was_sealed_opens_under_its_name_only() -> None:
    raw = seal.seal("a", b"body")
    another_process()
    assert bytes(seal.unseal("a", raw)) == b"body"
    with pytest.raises(seal.Broken, match="another name"):
        seal.unseal("b", raw)


@pytest.mark.parametrize("at", [0, 25, 52, -1])
def test_a_changed_byte_is_noticed(at: int) -> None:
    raw = bytearray(seal.seal("a", b"body"))
    raw[at] ^= 1
    with pytest.raises(seal.Broken):
        seal.unseal("a", bytes(raw))


@pytest.mark.parametrize("raw", [b"", seal.MAGIC, seal.MAGIC + b"x" * 31, b"x" * 100])
def test_what_is_too_short_or_of_another_kind_is_noticed(raw: bytes) -> None:
    with pytest.raises(seal.Broken):
        seal.unseal("a", raw)


def test_another_key_or_machine_opens_nothing(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = seal.seal("a", b"body")
    name = seal.name_of("graph")
    another_process()
    monkeypatch.setattr(seal, "_machine", lambda: b"another machine")
    with pytest.raises(seal.Broken):
        seal.unseal("a", raw)
    assert seal.name_of("graph") != name  # two machines that share a home directory do not remove each other's files
    monkeypatch.undo()
    monkeypatch.setenv("FUSEWRIGHT_STATE_DIR", str(state.with_name("other")))
    with pytest.raises(seal.Broken):
        seal.unseal("a", raw)


@posix
def test_the_key_is_random_and_the_users_alone(state: Path) -> None:
    before = os.umask(0)
    try:
        assert seal.usable()
    finally:
        os.umask(before)
    file = state / "key"
    assert len(file.read_bytes()) == seal.LENGTH and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    first = file.read_bytes()
    file.unlink()
    another_process()
    assert seal.usable() and file.read_bytes() != first


def test_processes_that_start_at_once_agree_on_the_key() -> None:
    several = [subprocess.Popen([sys.executable, "-c", MAKE_KEY], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({p.communicate()[0] for p in several}) == 1


def test_one_of_two_that_make_the_key_at_once_wins(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process's key already exists when ours is put in place."""
    folder = place.state()
    write = Folder.write

    def second(self: Folder, name: str, data: bytes, replace: bool = True) -> None:
        write(self, name, b"o" * seal.LENGTH)
        write(self, name, data, replace)

    monkeypatch.setattr(Folder, "write", second)
    assert seal._secret(folder) == b"o" * seal.LENGTH


@posix
@pytest.mark.parametrize("harm", ["readable", "writable", "link", "short", "long", "foreign", "folder open to others"])
def test_without_a_key_to_rely_on_nothing_is_kept_and_one_line_says_so(
    harm: str, state: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert seal.usable()
    file = state / "key"
    if harm == "readable":
        file.chmod(0o644)
    elif harm == "writable":
        file.chmod(0o622)
    elif harm == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif harm in ("short", "long"):
        file.write_bytes(b"k" * (seal.LENGTH + (1 if harm == "long" else -1)))
    elif harm == "foreign":
        if os.geteuid() != 0:
            pytest.skip("only root can make what belongs to another user")
        os.chown(file, STRANGER, -1)
    else:  # our own key is created in our own folder
        state.chmod(0o777)
    another_process()
    if harm == "folder open to others":
        assert seal.usable() and (state / f"fusewright-{os.geteuid()}" / "key").exists()
        return
    assert not seal.usable() and not seal.usable()
    (said,) = [r.getMessage() for r in caplog.records]
    assert str(file) in said and "nothing is cached on disk" in said and "FUSEWRIGHT_STATE_DIR" in said


@posix
def test_a_program_that_goes_on_as_another_user_uses_that_users_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seal.usable()
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER, raising=False)
    assert not seal.usable(), "the first user's key is not that user's"

"""A folder that only its user can write to: content that others could have put there is refused and left unchanged."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fusewright.cache import place
from fusewright.cache.folder import LIMIT, Folder, Untrusted

posix = pytest.mark.skipif(os.name != "posix", reason="owners and modes are POSIX's")
as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can make what belongs to another user"
)
STRANGER = 54321


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    tmp_path.chmod(0o700)
    return Folder(tmp_path)


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that FUSEWRIGHT_CACHE_DIR names; it does not exist yet."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path / "chosen"))
    return tmp_path / "chosen"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# ---------------------------------------------------------------- files


def test_what_was_written_is_read(folder: Folder) -> None:
    folder.write("a", b"1")
    folder.write("a", b"22")
    folder.append("a", b"3")
    assert folder.read("a") == b"223" and mode(folder.path / "a") == 0o600
    assert [f.name for f in folder.files()] == ["a"]
    assert folder.remove("a") and not folder.remove("a")
    with pytest.raises(FileNotFoundError):
        folder.read("a")


@posix
def test_a_link_in_place_of_a_file_is_refused(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("else") / "secret"
    secret.write_bytes(b"1")
    (folder.path / "a").symlink_to(secret)
    with pytest.raises(Untrusted, match="is no plain file"):
        folder.read("a")
    with pytest.raises(Untrusted):
        folder.append("a", b"2")
    folder.write("a", b"ours")  # replaces the link
    assert secret.read_bytes() == b"1" and folder.read("a") == b"ours"


@posix
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_pipe_or_folder_in_place_of_a_file_is_refused_at_once(folder: Folder, make: Callable[[Path], None]) -> None:
    make(folder.path / "a")
    said: list[OSError] = []

    def read() -> None:
        with pytest.raises(Untrusted, match="is no plain file") as e:
            folder.read("a")
        said.append(e.value)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(5)
    assert said, "it waits for a writer"


@posix
def test_a_file_that_others_can_write_is_refused(folder: Folder) -> None:
    folder.write("a", b"1")
    for bits in (0o620, 0o602):
        (folder.path / "a").chmod(bits)
        with pytest.raises(Untrusted, match="others can write to it"):
            folder.read("a")


@posix
def test_a_private_file_that_others_can_read_is_refused(folder: Folder) -> None:
    folder.write("a", b"1")
    (folder.path / "a").chmod(0o640)
    assert folder.read("a") == b"1"
    with pytest.raises(Untrusted, match="can be read by others"):
        folder.read("a", private=True)


@as_root
def test_a_file_of_another_user_is_refused(folder: Folder) -> None:
    folder.write("a", b"1")
    os.chown(folder.path / "a", STRANGER, -1)
    with pytest.raises(Untrusted, match="it belongs to another user"):
        folder.read("a")


def test_a_huge_file_is_not_read(folder: Folder) -> None:
    with open(folder.path / "a", "wb") as f:
        f.truncate(LIMIT + 1)
    (folder.path / "a").chmod(0o600)
    with pytest.raises(Untrusted, match=f"has {LIMIT + 1} bytes"):
        folder.read("a")


@pytest.mark.parametrize("name", ["../a", "", ".", "..", "b/c"])
def test_a_name_stays_in_the_folder(folder: Folder, name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a file"):
        folder.read(name)


def test_a_writer_that_fails_leaves_what_was_there(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write("a", b"old")
    monkeypatch.setattr(os, "replace", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        folder.write("a", b"new")
    assert [(f.name, folder.read(f.name)) for f in folder.files()] == [("a", b"old")]


@posix
def test_a_folder_exchanged_for_another_is_noticed(folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder.write("a", b"1")
    theirs = tmp_path_factory.mktemp("theirs")
    theirs.chmod(0o777)
    (theirs / "a").write_bytes(b"2")
    folder.path.rename(folder.path.with_name("away"))
    theirs.rename(folder.path)
    with pytest.raises(Untrusted, match="others can write to it"):
        folder.read("a")


# ---------------------------------------------------------------- where the cache is


@posix
def test_a_new_folder_and_its_parents_are_the_users_alone(chosen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(chosen / "deep" / "er"))
    before = os.umask(0)
    try:
        folder = place.cache()
        assert folder is not None
        folder.write("a", b"1")
    finally:
        os.umask(before)
    made = [chosen, chosen / "deep", chosen / "deep" / "er"]
    assert [mode(p) for p in made] == [0o700] * 3 and mode(folder.path / "a") == 0o600


@posix
@pytest.mark.parametrize("bits", [0o777, 0o1777, 0o770, 0o702])
def test_in_a_folder_that_others_can_write_ours_is_a_folder_of_its_own(chosen: Path, bits: int) -> None:
    chosen.mkdir()
    (chosen / f"{'a' * 64}.plan").write_bytes(b"planted")
    chosen.chmod(bits)
    folder = place.cache()
    assert folder is not None and folder.path == chosen / f"fusewright-{os.geteuid()}"
    assert folder.files() == [] and mode(folder.path) == 0o700
    assert mode(chosen) == bits and (chosen / f"{'a' * 64}.plan").exists()  # unchanged


@posix
def test_a_folder_that_others_can_only_read_is_good_enough(chosen: Path) -> None:
    chosen.mkdir()
    chosen.chmod(0o755)
    assert place.cache() == Folder(chosen) and mode(chosen) == 0o755


@posix
@pytest.mark.parametrize("how", ["link", "open"])
def test_a_planted_folder_of_our_name_is_refused(
    chosen: Path, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen.mkdir()
    planted = chosen / f"fusewright-{os.geteuid()}"
    (tmp_path / "theirs").mkdir()
    planted.symlink_to(tmp_path / "theirs") if how == "link" else planted.mkdir()
    if how == "open":
        planted.chmod(0o777)
    chosen.chmod(0o777)
    assert place.cache() is None and place.cache() is None
    (said,) = [r.getMessage() for r in caplog.records]
    assert f"{chosen} cannot be used, others can write to it; nor can {planted.name} in it" in said
    assert "Everything works" in said


@posix
def test_a_symbolic_link_is_refused(chosen: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    chosen.symlink_to(tmp_path / "target")
    assert place.cache() is None
    assert "it is a symbolic link" in caplog.text and list((tmp_path / "target").iterdir()) == []


@as_root
def test_a_folder_of_another_user_holds_ours_or_none(chosen: Path) -> None:
    chosen.mkdir(mode=0o700)
    os.chown(chosen, STRANGER, -1)
    folder = place.cache()
    assert folder is not None and folder.path.parent == chosen  # root may use it; the folder in it is root's
    os.chown(folder.path, STRANGER, -1)
    assert place.cache() is None


def test_a_file_in_place_of_the_folder_is_refused(chosen: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen.write_bytes(b"")
    assert place.cache() is None and str(chosen) in caplog.text


def test_a_relative_path_means_one_place_wherever_the_process_goes(
    chosen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", f"here-{tmp_path.name}")
    first = place.cache()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert first is not None and first.path == tmp_path / f"here-{tmp_path.name}" and place.cache() == first
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_tilde_is_the_home_directory(chosen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", f"~/of-{tmp_path.name}")
    folder = place.cache()
    assert folder is not None and folder.path == tmp_path / f"of-{tmp_path.name}"


def test_without_a_home_directory_nothing_is_cached_and_one_line_says_so(
    chosen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", "~nobody-of-this-name/x")
    assert place.cache() is None and place.cache() is None and place.existing_cache() is None
    assert caplog.text.count("nothing is cached on disk") == 1


@posix
def test_who_only_looks_makes_and_changes_nothing(chosen: Path) -> None:
    assert place.existing_cache() is None and not chosen.exists()
    chosen.mkdir()
    chosen.chmod(0o777)
    assert place.existing_cache() is None and list(chosen.iterdir()) == [] and mode(chosen) == 0o777

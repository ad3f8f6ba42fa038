"""Plans on disk: an entry is used only for the exact key it was written for; the model works whatever the folder contains."""

from __future__ import annotations

import copy
import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusewright.cache import place, seal, store
from fusewright.cache.store import Key
from fusewright.cache.tune import Tuner
from fusewright.plan import vocabulary
from fusewright_cpu.run import archive
from tests.unit.cache.graphs import affine, compiled, counted, folder, names, shifted
from tests.unit.cache.test_folder import STRANGER, as_root, posix

X = torch.randn(5)
pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.hardware("x86_onednn")]


def rewritten(name: str, change: Callable[[dict[str, Any]], None], code: bytes | None = None) -> None:
    """Rewrite the entry with other content and a valid seal, which only the user could do."""
    found = store.open_entry(folder(), name)
    change(found.data)
    body = store._packed(found.facts) + store._packed(found.data) + (found.code if code is None else code)
    folder().write(name + store.SUFFIX, seal.seal(name, body))


# ---------------------------------------------------------------- hits and misses


def test_what_one_process_compiled_the_next_finds() -> None:
    with counted() as made:
        first = compiled(affine)(X)
        assert torch.equal(compiled(affine)(X), first)
    assert len(made) == 1 and names() == made
    torch.testing.assert_close(first, affine(X))


def test_the_plan_of_a_recurrence_is_found() -> None:
    def states(a: torch.Tensor) -> torch.Tensor:
        h, seen = torch.ones_like(a[0]), []
        for x in a:
            h = x * h + x
            seen.append(h)
        return torch.stack(seen)

    a = torch.rand(9, 4)
    with counted() as made:
        results = [compiled(states)(a) for _ in range(2)]
    assert len(made) == 1 and names() == made
    assert all(torch.equal(r, states(a)) for r in results)


def test_both_plans_of_a_training_step_that_updates_statistics_are_found() -> None:
    theirs = torch.nn.Sequential(*(torch.nn.BatchNorm1d(6) for _ in range(3)))
    x, results = torch.randn(5, 6), []
    with counted() as made:
        for _ in range(2):
            ours = copy.deepcopy(theirs)
            compiled(ours)(x).sin().sum().backward()
            results.append([*ours.buffers(), *(p.grad for p in ours.parameters())])
    assert len(made) == 2 and set(names()) == set(made)
    assert all(map(torch.equal, *results))


def test_an_entry_copied_over_another_is_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    compiled(affine)(X)
    (a,) = names()
    compiled(shifted)(X)
    (b,) = set(names()) - {a}
    folder().write(b + store.SUFFIX, folder().read(a + store.SUFFIX))
    with counted() as made:
        assert torch.equal(compiled(shifted)(X), shifted(X))
    assert made == [b] and "cannot be used (Broken: it was changed, or written by somebody else" in caplog.text


def test_an_entry_holds_its_key_and_is_bound_to_it() -> None:
    """An entry under the right name with another key is refused."""
    key, other = Key({"graph": "a", "threads": "1"}), Key({"graph": "a", "threads": "2"})
    store.write(key, {}, {"plan": {}}, b"code", 1 << 20)
    assert store.open_entry(folder(), key.name).facts["key"] == {"graph": "a", "threads": "1"}
    body = bytes(seal.unseal(key.name, folder().read(key.name + store.SUFFIX)))
    folder().write(other.name + store.SUFFIX, seal.seal(other.name, body))
    assert store.read(other) is None and other.name not in names()
    assert store.read(key) is not None


def test_texts_of_a_key_do_not_run_into_each_other() -> None:
    assert Key({"a": "xy", "b": "z"}).name != Key({"a": "x", "b": "yz"}).name


def set_(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change that sets `value` at a path like "plan.instructions.0.kind"."""

    def change(data: dict[str, Any]) -> None:
        *way, last = path.split(".")
        at: Any = data
        for step in way:
            at = at[int(step)] if isinstance(at, list) else at[step]
        at[int(last) if isinstance(at, list) else last] = value

    return change


DAMAGE = {
    "no plan": lambda data: data.clear(),
    "a plan of another format": set_("plan.format", 0),
    "an instruction of no kind": set_("plan.instructions.0.kind", "exec"),
    "a number instead of a list": set_("plan.inputs", 3),
    "one input too many": lambda data: data["plan"]["inputs"].append(99),
    "no outputs": set_("plan.outputs", []),
    "a kernel that is not there": set_("plan.kernels", ["f" * 64]),
    "a dtype that is none": set_("plan.specs.1", [[5], [1], "os", "cpu", False]),
    "an operator that does not exist": set_("plan.instructions.0.target", "aten::no_such_operator.default"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_entry_that_does_not_load_is_removed_and_said_once(
    damage: Callable[[dict[str, Any]], None], caplog: pytest.LogCaptureFixture
) -> None:
    compiled(affine)(X)
    (name,) = names()
    rewritten(name, damage)
    with counted() as made:
        assert torch.equal(compiled(affine)(X), affine(X))
        assert torch.equal(compiled(affine)(X), affine(X))
    assert made == [name]
    assert caplog.text.count("cannot be used") == 1


@pytest.mark.parametrize(
    "error", [SyntaxError, RecursionError, MemoryError, UnicodeDecodeError("utf-8", b"", 0, 1, "x"), ZeroDivisionError], ids=str
)
def test_whatever_keeps_an_entry_from_loading_is_a_miss(error: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(affine)(X)

    def fails(*_: Any) -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(vocabulary, "find_problems", fails)
    with counted() as made:
        assert torch.equal(compiled(affine)(X), affine(X))
    assert len(made) == 1


TWO = (2).to_bytes(8, "little")


@pytest.mark.parametrize("body", [b"", b"\xff" * 9, b"\xff" * 8 + b"{}", TWO + b"{}", TWO + b"[]" + TWO + b"[]"])
def test_a_sealed_body_that_is_no_entry_is_a_miss(body: bytes) -> None:
    key = Key({"graph": "a"})
    folder().write(key.name + store.SUFFIX, seal.seal(key.name, body))
    assert store.read(key) is None and names() == []


@pytest.mark.parametrize("depth", [10, 100_000])
def test_json_of_any_depth_is_a_miss(depth: int) -> None:
    key = Key({"graph": "a"})
    text = b"[" * depth + b"]" * depth
    folder().write(key.name + store.SUFFIX, seal.seal(key.name, len(text).to_bytes(8, "little") + text))
    assert store.read(key) is None and names() == []


# ---------------------------------------------------------------- what others put there


@posix
def test_a_planted_entry_is_not_even_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The directory already existed, writable by all, with an entry of another user; ours is a folder inside it."""
    planted = tmp_path / "cache"
    planted.mkdir()
    compiled_elsewhere = Key({"graph": "a"})
    (planted / f"{compiled_elsewhere.name}.plan").write_bytes(b"planted")
    planted.chmod(0o777)
    with counted() as made:
        assert torch.equal(compiled(affine)(X), affine(X))
        assert torch.equal(compiled(affine)(X), affine(X))
    assert len(made) == 1 and names() == made
    assert [p.name for p in planted.glob("*.plan")] == [f"{compiled_elsewhere.name}.plan"]


@posix
@pytest.mark.parametrize("how", ["link", "pipe", "folder", "writable", "foreign", "unreadable"])
def test_what_is_no_file_of_ours_in_the_place_of_an_entry_is_a_miss(how: str, tmp_path: Path) -> None:
    compiled(affine)(X)
    (name,) = names()
    path = folder().path / f"{name}.plan"
    raw = path.read_bytes()
    path.unlink()
    if how == "link":
        (tmp_path / "elsewhere").write_bytes(raw)
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    else:
        path.write_bytes(raw)
        path.chmod({"writable": 0o666, "unreadable": 0}.get(how, 0o600))
        if how == "foreign":
            if os.geteuid() != 0:
                pytest.skip("only root can make what belongs to another user")
            os.chown(path, STRANGER, -1)
    if how == "unreadable" and os.geteuid() == 0:
        pytest.skip("root reads everything; runs as any other user")
    with counted() as made:
        assert torch.equal(compiled(affine)(X), affine(X))
    assert made == [name]


def test_a_hard_link_under_another_name_is_a_miss() -> None:
    compiled(affine)(X)
    (a,) = names()
    key = Key({"graph": "a"})
    os.link(folder().path / f"{a}.plan", folder().path / f"{key.name}.plan")
    assert store.read(key) is None and names() == [a]


def test_a_forged_entry_runs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An extra instruction runs Python; everything about the entry is valid except its key."""
    compiled(affine)(X)
    (name,) = names()
    mark = tmp_path / "it ran"
    hostile = {"kind": "call", "target": "py::builtins.exec", "args": [f"open({str(mark)!r}, 'w')"], "outs": [99], "kwargs": []}
    found = store.open_entry(folder(), name)
    found.data["plan"]["instructions"].insert(0, hostile)
    body = store._packed(found.facts) + store._packed(found.data) + found.code
    by_another = hmac.digest(b"a key of their own" * 2, b"file\0" + name.encode() + b"\0" + body, "sha256")
    former = b"fusewright-plan-1\n" + hashlib.sha256(body).digest() + body
    for raw in (former, seal.MAGIC + hashlib.sha256(body).digest() + body, seal.MAGIC + by_another + body):
        folder().write(name + store.SUFFIX, raw)
        with counted() as made:
            assert torch.equal(compiled(affine)(X), affine(X))
        assert made == [name] and not mark.exists()
    assert caplog.text.count("cannot be used (Broken") == 3


@pytest.mark.parametrize(
    "wrong",
    [
        lambda plan: plan.update(instructions=[]),  # nothing makes the result
        lambda plan: plan["instructions"].append(plan["instructions"][-1]),  # made twice
        lambda plan: plan["instructions"][-1].update(inputs=[]),  # a kernel without its input
        lambda plan: plan.update(inputs=[99], outputs=[{"ref": 98}]),
    ],
)
def test_a_sealed_plan_that_is_no_plan_is_a_miss(wrong: Callable[[dict[str, Any]], None], caplog: pytest.LogCaptureFixture) -> None:
    compiled(affine)(X)
    (name,) = names()
    rewritten(name, lambda data: wrong(data["plan"]))
    with counted() as made:
        assert torch.equal(compiled(affine)(X), affine(X))
    assert made == [name] and "PlanError" in caplog.text


def test_machine_code_runs_only_from_a_sealed_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(affine)(X)
    (name,) = names()
    raw = folder().read(name + store.SUFFIX)
    linked: list[int] = []
    unpack = archive.unpack
    monkeypatch.setattr(archive, "unpack", lambda data: (linked.append(len(data)), unpack(data))[1])
    folder().write(name + store.SUFFIX, raw[:-1] + bytes([raw[-1] ^ 1]))  # one bit of the code
    compiled(affine)(X)
    assert linked == []
    compiled(affine)(X)
    assert linked == [len(store.open_entry(folder(), name).code)]


# ---------------------------------------------------------------- without a place to write


@pytest.mark.parametrize("variable", ["FUSEWRIGHT_CACHE_DIR", "FUSEWRIGHT_STATE_DIR"])
def test_where_nothing_can_be_written_everything_works_and_one_line_says_so(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv(variable, str(tmp_path / "file" / "in"))
    for fn in (affine, shifted):
        torch.testing.assert_close(compiled(fn)(X), fn(X))
    assert caplog.text.count("nothing is cached on disk") == 1


def test_a_full_disk_costs_only_the_cache(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    for fn in (affine, shifted):
        assert torch.equal(compiled(fn)(X), fn(X))
    monkeypatch.undo()
    assert caplog.text.count("a plan was not cached: [Errno 28] No space left on device") == 1


def test_a_folder_that_becomes_read_only_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened = os.open

    def read_only(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(30, "Read-only file system", path)  # a temporary name, as the system's error has it
        return opened(path, flags, *args, **options)

    assert seal.usable()  # the key is made
    monkeypatch.setattr(os, "open", read_only)
    for fn in (affine, shifted):
        assert torch.equal(compiled(fn)(X), fn(X))
    monkeypatch.undo()
    assert caplog.text.count("was not cached: [Errno 30] Read-only file system") == 1


def test_a_limit_that_is_no_number_is_said_once_and_the_default_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_MB", "plenty")
    for fn in (affine, shifted):
        assert torch.equal(compiled(fn)(X), fn(X))
    assert len(names()) == 2
    assert caplog.text.count("FUSEWRIGHT_CACHE_MB='plenty' is not a whole number; it counts as 512") == 1


def test_the_cache_may_be_deleted_at_any_time(tmp_path: Path) -> None:
    import shutil

    compiled(affine)(X)
    shutil.rmtree(tmp_path / "cache")
    compiled(shifted)(X)
    assert len(names()) == 1


# ---------------------------------------------------------------- room


def entry(graph: str, size: int, used: float) -> str:
    key = Key({"graph": graph})
    store.write(key, {}, {}, b"x" * size, 1 << 30)
    os.utime(folder().path / f"{key.name}.plan", (used, used))
    return key.name


def temporary(age: float, name: str = "a" * 64 + ".plan") -> Path:
    """A temporary file of a writer that was killed `age` seconds ago."""
    path = folder().path / f".{name}.123.{'0' * 16}.tmp"
    path.write_bytes(b"x" * 5000)
    os.utime(path, (time.time() - age,) * 2)
    return path


def test_what_was_used_last_is_kept_longest() -> None:
    old, new, newest = (entry(g, 1000, time.time() - age) for g, age in (("a", 300), ("b", 200), ("c", 100)))
    assert store.read(Key({"graph": "a"})) is not None  # marks it as recently used
    assert store.prune(3000) == 1 and set(names()) == {old, newest} and new not in names()


def test_what_killed_writers_left_is_counted_and_swept_when_it_is_old() -> None:
    entry("a", 1000, time.time())
    before = store.total_bytes()
    young, old = temporary(60), temporary(2 * store.STALE, "choices")
    assert store.total_bytes() == before + 10_000
    store.prune(1 << 30)
    assert young.exists() and not old.exists()
    store.clear()
    assert not young.exists() and store.total_bytes() == 0


def test_files_that_are_not_ours_are_neither_counted_nor_removed() -> None:
    theirs = [folder().path / n for n in ("summer.plan", "notes.txt", ".editor.tmp", "x" * 64 + ".plan")]
    for path in theirs:
        path.write_bytes(b"x" * 1000)
    store.prune(0)
    assert store.clear() == 0 and store.total_bytes() == 0 and all(p.exists() for p in theirs)


def test_hits_are_counted_and_go_with_their_entry() -> None:
    entry("a", 10, time.time())
    for _ in range(3):
        assert store.read(Key({"graph": "a"})) is not None
    assert [e.hits for e in store.entries()] == [3]
    store.prune(0)
    assert folder().files() == [f for f in folder().files() if f.name == "prune.lock"]


# ---------------------------------------------------------------- choices


def test_choices_that_this_user_did_not_write_are_measured_again(caplog: pytest.LogCaptureFixture) -> None:
    tuner = Tuner("scope")
    tuner._new["k"] = "a"
    tuner.save()
    assert Tuner("scope")._known == {"k": "a"}
    forged = json.dumps({Tuner("scope").scope: {"k": "b"}}).encode()
    folder().write("choices", forged)
    folder().write("choices.json", forged)  # the former format
    assert Tuner("scope")._known == {}
    assert caplog.text.count("the remembered choices cannot be used") == 1
    assert Tuner("scope")._known == {} and caplog.text.count("cannot be used") == 1


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"SCOPE": 3}', b'{"SCOPE": {"k": ["b"]}}', b"\xff"])
def test_sealed_choices_of_another_form_are_no_choices(content: bytes) -> None:
    scope = Tuner("scope").scope
    folder().write("choices", seal.seal("choices", content.replace(b"SCOPE", scope.encode())))
    assert Tuner("scope")._known == {}


@as_root
def test_choices_of_another_user_are_not_read() -> None:
    folder().write("choices", seal.seal("choices", b"{}"))
    os.chown(folder().path / "choices", STRANGER, -1)
    assert store.read_choices() == {} and place.cache() is not None

"""Ten thousand untrusted entries: none executes anything, none is used, none breaks a model."""

from __future__ import annotations

import ast
import builtins
import hashlib
import hmac
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fusewright import pipeline
from fusewright.cache import seal, store
from fusewright.cache.folder import Folder
from fusewright.interface import KernelCode
from fusewright.plan import serial
from fusewright.plan.execute import cached, codegen
from fusewright.plan.memory import place
from tests.unit.cache.graphs import compiled, folder, names

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.hardware("x86_onednn")]
X = torch.randn(6, 5)
RANDOM, FORGED, SIGNED = 4000, 3000, 3000

CODE = "__import__('builtins').CANARY.append(1)"
STRINGS = (
    CODE, f"v1 = {CODE}", f"\n    {CODE}\n", f"0]; {CODE}; [0", f"'); {CODE} #", f"{{0.__class__}}{CODE}", f"torch; {CODE}",
    "{0.__class__.__init__.__globals__}", "py::builtins.exec", "py::builtins.getattr", "py::builtins.__import__",
    "aten::from_file.default", "aten::relu.__class__", "../../key", "os", "__class__", "a" * 70000, "\ud800", "",
)  # fmt: skip
DEEP: Any = [[[[[[[[[[]]]]]]]]]]
VALUES = (None, True, -1, 1 << 31, 1 << 80, 1e400, {}, [], {"ref": CODE}, {"dtype": "os"}, {"device": CODE}, DEEP)


def model(x: torch.Tensor) -> torch.Tensor:
    """A model whose plan has calls, a kernel, an attribute and a list."""
    a, b = torch.relu(x * 3 - 2).split([2, 3], 1)
    return torch.cat([a, b.cumsum(0)], 1) + torch.tensor([1.0, 2, 3, 4, 5])


@pytest.fixture
def canary(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that code of a hostile entry would append to."""
    found: list[int] = []
    monkeypatch.setattr(builtins, "CANARY", found, raising=False)
    return found


@pytest.fixture
def executed(canary: list[int]) -> Iterator[list[str]]:
    """Collect imports and started processes from Python's audit events."""
    found: list[str] = []
    watched = True

    def hook(event: str, args: tuple[Any, ...]) -> None:
        known = event == "import" and args[0] in sys.modules
        if watched and event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "import") and not known:
            found.append(f"{event} {str(args)[:100]}")

    sys.addaudithook(hook)
    yield found
    watched = False


class Loader:
    """The model's cache slot, and the path from its file to a callable."""

    def __init__(self) -> None:
        self.args: Any = None
        find = cached.find

        def spy(*args: Any) -> Any:
            self.args = args
            return find(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline.cached, "find", spy)
            self.result = compiled(model)(X)
        self.slot: cached.Slot = self.args[0]
        self.name = self.slot.key.name
        self.folder: Folder = folder()
        self.content = store.open_entry(self.folder, self.name)

    def loads(self, raw: bytes) -> bool:
        self.folder.write(self.name + store.SUFFIX, raw)
        return cached.find(*self.args) is not None

    def text(self) -> str:
        """The Python text generated from the stored plan."""
        plan = serial.from_data(store.open_entry(self.folder, self.name).data["plan"], lambda name: None)
        assert not list(self.slot.problems(plan))
        names = codegen.Names()
        kernels = dict.fromkeys(plan.kernels, KernelCode(lambda *_: None))
        return codegen.source(plan, names, codegen._Launches(plan, place(plan), kernels, names))

    def sealed(self, data: Any, code: bytes) -> bytes:
        """Seal an entry as the user's own process would, to test the second line of defence."""
        body = store._packed(self.content.facts) + store._packed(data) + code
        return seal.seal(self.name, body)


def places(data: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to everything in JSON data."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def with_value(data: Any, way: tuple[Any, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(data))
    at = copy
    for step in way[:-1]:
        at = at[step]
    at[way[-1]] = value
    return copy


def random_entry(rng: random.Random, good: bytes) -> bytes:
    """Return random bytes, or an entry that was truncated, changed, duplicated or recombined."""
    match rng.randrange(5):
        case 0:
            return rng.randbytes(rng.randrange(300))
        case 1:
            return good[: rng.randrange(len(good))]
        case 2:
            at = rng.randrange(len(good))
            return good[:at] + bytes([good[at] ^ rng.randrange(1, 256)]) + good[at + 1 :]
        case 3:
            return good + rng.randbytes(rng.randrange(1, 40))
    a, b = sorted((rng.randrange(len(good)), rng.randrange(len(good))))
    return good[:a] + good[b:] if a < b else good[1:]


def hostile(rng: random.Random, data: Any, ways: list[tuple[Any, ...]]) -> Any:
    """Put something outside of the vocabulary into a plan."""
    value = rng.choice(STRINGS) if rng.random() < 0.7 else rng.choice(VALUES)
    if rng.random() < 0.2:
        extra = {"kind": "call", "target": rng.choice(STRINGS), "args": [value], "outs": [99], "kwargs": [], "prepare": False}
        return with_value(data, ("plan", "instructions"), [extra, *data["plan"]["instructions"]])
    return with_value(data, rng.choice(ways), value)


def forged_seal(name: str, body: bytes, rng: random.Random) -> bytes:
    """Forge a seal without the key: the former format with its valid hash, or a tag made with another key."""
    if rng.random() < 0.5:
        return b"fusewright-plan-1\n" + hashlib.sha256(body).digest() + body
    return seal.MAGIC + hmac.digest(rng.randbytes(32), b"file\0" + name.encode() + b"\0" + body, "sha256") + body


OURS = re.compile(r"shape|data_ptr|storage_offset|clear|take|give_back|device|[vbp]\d+|[a-z]\w+", re.ASCII)


def assert_harmless(text: str) -> None:
    """Check that Python text calls only functions of the vocabulary and reaches nothing else indirectly."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Import | ast.ImportFrom | ast.Lambda | ast.ClassDef | ast.Global), text
        if isinstance(node, ast.Name):
            assert not node.id.startswith("_") and node.id != "CANARY", text
        if isinstance(node, ast.Attribute):
            assert OURS.fullmatch(node.attr), text
    assert {n.name for n in tree.body if isinstance(n, ast.FunctionDef)} <= {"run", "prepare"} and all(
        isinstance(n, ast.FunctionDef) for n in tree.body
    ), text


@pytest.mark.slow
def test_ten_thousand_hostile_entries(canary: list[int], executed: list[str]) -> None:
    rng = random.Random(12)
    loader = Loader()
    good = loader.folder.read(loader.name + store.SUFFIX)
    assert loader.loads(good), "the road from the file to a callable is the one that is tried"
    data = loader.content.data
    ways = [w for w in places(data) if w != ("summary",)]
    body = store._packed(loader.content.facts) + store._packed(data) + loader.content.code
    makers: tuple[tuple[int, Callable[[], bytes]], ...] = (
        (RANDOM, lambda: random_entry(rng, good)),
        (FORGED, lambda: forged_seal(loader.name, body, rng)),
        (SIGNED, lambda: loader.sealed(hostile(rng, data, ways), loader.content.code)),
    )
    executed.clear()
    used = 0
    for count, make in makers:
        for k in range(count):
            raw = make()
            if loader.loads(raw):  # a changed entry may still be a valid plan, e.g. with another string or number
                used += 1
                assert raw.startswith(seal.MAGIC) and make is makers[-1][1]
                assert_harmless(loader.text())
            elif k % 500 == 0:
                assert torch.equal(compiled(model)(X), loader.result)
    assert canary == [] and executed == []
    assert torch.equal(compiled(model)(X), loader.result) and names() == [loader.name]
    assert sum(n for n, _ in makers) == 10_000 and used < SIGNED // 10

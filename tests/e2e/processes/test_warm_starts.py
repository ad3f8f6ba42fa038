"""`fusewright.save` and `load`: a saved file gives right results or is refused with a reason."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusewright
from fusewright import registry
from fusewright.aot import file, identity
from fusewright.cache import seal
from fusewright.errors import ArtifactError

BACKEND = registry.best("cpu") or "fusewright_null"


class Block(nn.Module):
    def __init__(self, width: int = 16, slope: float = 1.0) -> None:
        super().__init__()
        self.norm, self.linear, self.slope = nn.LayerNorm(width), nn.Linear(width, width), slope

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        y = x + torch.tanh(self.linear(self.norm(x))) * self.slope
        return {"y": y * scale, "shifted": y + torch.tensor([1.0, 2.0]).sum()}


@pytest.fixture(scope="module")
def model() -> Block:
    torch.manual_seed(0)
    return Block().eval()


@pytest.fixture(scope="module")
def saved(model: Block, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("aot") / "model.fusewright"
    return path, fusewright.save(
        model, path, torch.randn(4, 16), {"x": torch.randn(2, 16), "scale": 2.0}, backend=BACKEND
    )


def _same(model: nn.Module, loaded: Any, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        wanted = model(*args, **kwargs)
    got = loaded(*args, **kwargs)
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5)
        assert not value.requires_grad


def test_a_loaded_program_gives_what_the_model_gives(model: Block, saved: tuple[Path, str]) -> None:
    path, digest = saved
    loaded = fusewright.load(model, path, sha256=digest)
    _same(model, loaded, torch.randn(4, 16))
    _same(model, loaded, x=torch.randn(2, 16), scale=2.0)
    _same(model, loaded, scale=2.0, x=torch.randn(2, 16))


def test_inputs_that_lie_otherwise_in_memory_are_right_too(model: Block, saved: tuple[Path, str]) -> None:
    loaded = fusewright.load(model, saved[0])
    _same(model, loaded, torch.randn(16, 4).t())
    _same(model, loaded, torch.randn(8, 32)[::2, ::2])
    _same(model, loaded, torch.randn(16).expand(4, 16))
    _same(model, loaded, torch.full((4, 16), float("nan")).nan_to_num(3.0))


class Casts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32).pow(2).mean(-1, keepdim=True).to(x.dtype) * x


def test_a_model_that_casts_is_saved(tmp_path: Path) -> None:
    """torch.export asserts the type of what is cast, as in the norms of Llama."""
    fusewright.save(Casts().eval(), tmp_path / "m", torch.ones(2, 4).bfloat16(), backend=BACKEND)
    x = torch.randn(2, 4).bfloat16()
    torch.testing.assert_close(fusewright.load(Casts().eval(), tmp_path / "m")(x), Casts()(x))


def test_nothing_is_traced_or_compiled(model: Block, saved: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("a loaded program compiles nothing")

    monkeypatch.setattr(torch, "compile", never)
    monkeypatch.setattr(torch.export, "export", never)
    monkeypatch.setattr("fusewright.pipeline.compile_graph", never)
    backend = registry.info(BACKEND).cls
    assert backend is not None
    monkeypatch.setattr(backend, "load", never)
    monkeypatch.setattr(backend, "compile", never)
    _same(model, fusewright.load(model, saved[0]), torch.randn(4, 16))


def test_weights_are_the_models_own_and_may_change(saved: tuple[Path, str]) -> None:
    torch.manual_seed(1)
    tuned = Block().eval()
    loaded = fusewright.load(tuned, saved[0])
    _same(tuned, loaded, torch.randn(4, 16))
    with torch.no_grad():
        tuned.linear.weight.mul_(2)
    _same(tuned, loaded, torch.randn(4, 16))
    tuned.linear.weight = nn.Parameter(torch.randn(16, 16))
    _same(tuned, loaded, torch.randn(4, 16))


def test_a_weight_that_took_another_form_is_refused(saved: tuple[Path, str]) -> None:
    changed = Block().eval()
    loaded = fusewright.load(changed, saved[0])
    changed.linear.weight.data = torch.randn(16, 16).t()
    with pytest.raises(ArtifactError, match=r"'linear.weight' was float32.* with strides"):
        loaded(torch.randn(4, 16))


def test_a_call_that_was_not_saved_says_which_were(model: Block, saved: tuple[Path, str]) -> None:
    loaded = fusewright.load(model, saved[0])
    with pytest.raises(
        ArtifactError, match=r"no saved program takes \(float32\[3, 16\]\); there are: float32\[4, 16\]"
    ):
        loaded(torch.randn(3, 16))
    with pytest.raises(ArtifactError, match="no saved program takes"):
        loaded(torch.randn(4, 16).double())


def test_a_call_under_autocast_is_not_what_was_saved(model: Block, saved: tuple[Path, str]) -> None:
    """Autocast casts arguments of library calls, which hold packed weights of another type: the process ended."""
    loaded = fusewright.load(model, saved[0])
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ArtifactError, match="without autocast"):
        loaded(torch.randn(4, 16))
    _same(model, loaded, torch.randn(4, 16))


def test_what_was_not_saved_is_compiled_if_asked(
    model: Block, saved: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    loaded = fusewright.load(model, saved[0], otherwise="compile")
    _same(model, loaded, torch.randn(3, 16))
    assert "This call is compiled" in caplog.text
    fusewright.load(Block(slope=2.0).eval(), saved[0], otherwise="compile")
    assert "the model is compiled instead" in caplog.text


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda: Block(slope=0.5).eval(), "slope was 1.0, is 0.5"),
        (lambda: Block(32).eval(), "normalized_shape"),
        (lambda: Block().train(), "training was False, is True"),
        (lambda: nn.Linear(16, 16).eval(), "class was .*Block, is torch.nn"),
        (lambda: Block().double().eval(), "norm.weight was parameter float32.* is parameter float64"),
    ],
)
def test_another_model_is_refused(saved: tuple[Path, str], other: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        fusewright.load(other(), saved[0])


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ("torch", "torch was 2"),
        ("device, its features and libraries", "device"),
        ("installed files", "installed files"),
    ],
)
def test_another_machine_or_installation_is_refused(
    model: Block, saved: tuple[Path, str], part: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = identity.of_machine
    monkeypatch.setattr(identity, "of_machine", lambda backend: {**real(backend), part: "another"})
    with pytest.raises(ArtifactError, match=f"{says}.*Save it again here"):
        fusewright.load(model, saved[0])


def test_only_the_digest_or_the_users_own_key_opens_a_file(
    model: Block, saved: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSEWRIGHT_STATE_DIR", str(tmp_path / "another user's"))
    with pytest.raises(ArtifactError, match="this user did not write it on this machine"):
        fusewright.load(model, saved[0])
    _same(model, fusewright.load(model, saved[0], sha256=saved[1]), torch.randn(4, 16))
    with pytest.raises(ArtifactError, match="SHA-256 is not the one given"):
        fusewright.load(model, saved[0], sha256="0" * 64)
    with pytest.raises(ArtifactError, match="'1234' is no SHA-256: give the 64"):
        fusewright.load(model, saved[0], sha256="1234")


def test_hostile_bytes_are_refused_before_they_are_looked_at(
    model: Block, saved: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, draw, path = saved[0].read_bytes(), random.Random(0), tmp_path / "hostile"
    monkeypatch.setattr(file, "_parsed", lambda _: pytest.fail("it was parsed"))
    changed = bytearray(whole)
    for size in (0, 1, len(file.MAGIC), len(file.MAGIC) + 32, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ArtifactError):
            fusewright.load(model, path)
    for _ in range(100):
        at = draw.randrange(len(changed))
        changed[at] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(ArtifactError):
            fusewright.load(model, path)
        with pytest.raises(ArtifactError):
            fusewright.load(model, path, sha256=saved[1])
        changed[at] = whole[at]
        path.write_bytes(file.MAGIC + draw.randbytes(draw.randrange(4000)))
        with pytest.raises(ArtifactError):
            fusewright.load(model, path)


def _resealed(saved: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """Write an authentic file with changed content."""
    body = memoryview(saved.read_bytes())[len(file.MAGIC) + 32 :]
    head, blobs = file._parsed(body)
    change(head)
    return file.write(path, head, blobs)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(format=99),
        lambda h: h.update(backend="no_such_backend"),
        lambda h: h.update(programs=[{}]),
        lambda h: h.update(programs=7),
        lambda h: h["programs"][0].update(takes="[1, {}]"),
        lambda h: h["programs"][0].update(gives=h["programs"][0]["takes"]),
        lambda h: h["programs"][0].update(code=99),
        lambda h: h["programs"][0]["plan"]["inputs"].pop(),
        lambda h: h["programs"][0]["plan"].update(format=-1),
        lambda h: h["programs"][0]["plan"]["instructions"].insert(
            0, {"kind": "call", "target": "os::system", "args": ["true"], "outs": [999]}
        ),
        lambda h: h["programs"][0]["plan"]["instructions"].pop(0),
        lambda h: h["programs"][0]["leaves"][0].__setitem__(0, [400, 1600]),
        lambda h: h["programs"][0]["inputs"].__setitem__(0, ["leaf", 50, h["programs"][0]["leaves"][0]]),
        lambda h: [s[0].__setitem__(0, 4096) for s in h["programs"][0]["plan"]["specs"].values() if s[0]],
    ],
)
def test_a_file_of_who_has_the_key_runs_nothing_but_a_plan(
    model: Block, saved: tuple[Path, str], tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = tmp_path / "resealed"
    _resealed(saved[0], path, change)
    with pytest.raises(ArtifactError):
        fusewright.load(model, path, warm_up=False)


def test_the_digest_is_that_of_the_file_which_has_no_weights(model: Block, saved: tuple[Path, str]) -> None:
    written = saved[0].read_bytes()
    assert hashlib.sha256(written).hexdigest() == saved[1]
    assert model.linear.weight[0].detach().numpy().tobytes() not in written


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


class Looks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("made", "given", "says"),
    [
        (lambda: nn.Linear(4, 4), (torch.randn(2, 4),), r"call model.eval\(\) first"),
        (lambda: nn.Linear(4, 4).eval(), (), "needs the arguments of a call"),
        (lambda: torch.relu, (torch.randn(2),), "takes a torch.nn.Module"),
        (lambda: Writes().eval(), (torch.randn(4),), "writes in place"),
        (lambda: Looks().eval(), (torch.randn(4),), "torch.export cannot export the model"),
    ],
)
def test_what_cannot_be_saved_says_why(
    made: Callable[[], Any], given: tuple[Any, ...], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ArtifactError, match=says):
        fusewright.save(made(), tmp_path / "m", *given, backend=BACKEND)
    assert not list(tmp_path.iterdir())


def test_a_compiled_model_brings_its_backend_and_options(model: Block, tmp_path: Path) -> None:
    compiled = torch.compile(model, backend=BACKEND, options={"disable_rules": ["cse"]})
    fusewright.save(compiled, tmp_path / "m", torch.randn(4, 16))
    head, _ = file.read(tmp_path / "m", None)
    assert (head["backend"], head["options"]) == (BACKEND, {"disable_rules": ["cse"]})
    _same(model, fusewright.load(compiled, tmp_path / "m"), torch.randn(4, 16))


def test_where_there_is_no_key_the_digest_alone_opens_it(
    model: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal, "_key", lambda: None)
    digest = fusewright.save(model, tmp_path / "m", torch.randn(4, 16), backend="fusewright_null")
    with pytest.raises(ArtifactError, match="this user did not write it"):
        fusewright.load(model, tmp_path / "m")
    _same(model, fusewright.load(model, tmp_path / "m", sha256=digest), torch.randn(4, 16))

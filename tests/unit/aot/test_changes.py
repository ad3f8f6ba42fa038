"""A loaded program notices at the next call what became of its model, and of its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusewright
from fusewright.aot import identity
from fusewright.aot.load import check_device
from fusewright.aot.watch import same_entries
from fusewright.errors import ArtifactError
from fusewright.plan import native

X = torch.linspace(-1, 1, 12).view(3, 4)


@dataclass
class Config:
    slope: float = 2.0


@dataclass(slots=True)
class Limits:
    low: float = -9.0


class Net(nn.Module):
    kind = 1.0

    def __init__(self, act: Callable[..., Any] = F.relu) -> None:
        super().__init__()
        self.encode, self.act, self.decode = nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)
        self.decode.weight = self.encode.weight
        self.register_buffer("mean", torch.ones(4))
        self.function, self.config, self.steps, self._private = act, Config(), [1.0, {"scale": 1.0}], 1.0
        self.limits, self.offsets = Limits(), numpy.zeros(4, dtype=numpy.float32)
        self.table, self.partial = torch.ones(4), functools.partial(torch.mul, other=1.0)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.decode(self.function(self.act(self.encode(x)))) * self.config.slope * self.kind * self._private
        y = self.partial(y) * self.steps[0] * self.steps[1]["scale"] * self.table + self.mean  # type: ignore[index]
        y = y.clamp(self.limits.low) + float(self.offsets[0])
        return y / scale if mask is None else y * mask


def _net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("aot") / "net"
    fusewright.save(_net(), made, X, {"x": X, "scale": 0.0}, backend="fusewright_null")
    return made


@pytest.fixture(params=["python", "native"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with the extension and without."""
    if request.param == "native" and native.absent():
        pytest.skip(f"no extension, runs with fusewright-native built: {native.absent()}")
    monkeypatch.setenv("FUSEWRIGHT_NATIVE", str(int(request.param == "native")))
    return str(request.param)


def _reclassed(m: Net) -> None:
    m.act.__class__ = nn.Tanh  # type: ignore[assignment]


CHANGES: dict[str, Callable[[Net], Any]] = {
    "another module": lambda m: setattr(m, "act", nn.Tanh().eval()),
    "another class": _reclassed,
    "a hook": lambda m: m.act.register_forward_hook(lambda module, args, out: out * 2),
    "a hook before": lambda m: m.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "a forward of its own": lambda m: setattr(m.act, "forward", torch.tanh),
    "training": lambda m: m.train(),
    "an attribute": lambda m: setattr(m, "_private", 2.0),
    "an integer for a float": lambda m: setattr(m, "_private", 1),
    "a list": lambda m: m.steps.__setitem__(0, 2.0),
    "a dict in a list": lambda m: m.steps[1].__setitem__("scale", 2.0),  # type: ignore[index,union-attr]
    "a configuration": lambda m: setattr(m.config, "slope", 3.0),
    "another configuration": lambda m: setattr(m, "config", Config(3.0)),
    "another function": lambda m: setattr(m, "function", F.silu),
    "another argument of a partial": lambda m: setattr(m, "partial", functools.partial(torch.mul, other=3.0)),
    "another constant": lambda m: setattr(m, "table", torch.zeros(4)),
    "a constant in place": lambda m: m.table.mul_(2),
    "a constant elsewhere": lambda m: setattr(m.table, "data", torch.zeros(4)),
    "a slot": lambda m: setattr(m.limits, "low", 0.0),
    "an array": lambda m: m.offsets.__setitem__(0, 1.0),
    "untied": lambda m: setattr(m.decode, "weight", nn.Parameter(torch.eye(4))),
    "untied by loading": lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
    "a bias": lambda m: setattr(m.encode, "bias", nn.Parameter(torch.ones(4))),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m.encode),
    "another dtype": lambda m: m.double(),
    "another device": lambda m: m.to("meta"),
    "transposed in place": lambda m: setattr(m.encode.weight, "data", m.encode.weight.data.t()),
    "a sparse weight": lambda m: setattr(m.encode, "weight", nn.Parameter(torch.eye(4).to_sparse())),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_became_another_model_is_an_error_that_names_the_fix(path: Path, either: str, change: str) -> None:
    m = _net()
    loaded = fusewright.load(m, path)
    torch.testing.assert_close(loaded(X), m(X))
    CHANGES[change](m)
    with pytest.raises(ArtifactError, match=r"(?s)Save the model as it is now, and load that, or load"):
        loaded(X)
    with pytest.raises(ArtifactError):
        fusewright.load(m, path)


@pytest.mark.parametrize("kind", [Net, nn.ReLU])
def test_a_class_that_somebody_patched_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch, either: str, kind: type) -> None:
    loaded = fusewright.load(_net(), path)
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, x: x)
        with pytest.raises(ArtifactError, match="forward was "):
            loaded(X)
    loaded(X)
    monkeypatch.setattr(Net, "kind", 3.0)
    with pytest.raises(ArtifactError, match=r"kind was 1\.0, is 3\.0"):
        loaded(X)


def test_a_hook_of_all_modules_is_noticed_until_it_is_removed(path: Path, either: str) -> None:
    m = _net()
    loaded = fusewright.load(m, path)
    with nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 2):
        with pytest.raises(ArtifactError, match="after every module"):
            loaded(X)
    torch.testing.assert_close(loaded(X), m(X))


def test_weights_are_read_where_the_model_keeps_them_now(path: Path, either: str) -> None:
    m = _net()
    loaded = fusewright.load(m, path)
    m.encode, m.decode = nn.Linear(4, 4, bias=False).eval(), nn.Linear(4, 4, bias=False).eval()
    m.decode.weight = m.encode.weight
    torch.testing.assert_close(loaded(X), m(X))
    m.mean.mul_(7)
    torch.testing.assert_close(loaded(X), m(X))


def test_a_model_that_was_made_in_inference_mode_is_loaded(path: Path, either: str) -> None:
    with torch.inference_mode():
        m = _net()
    loaded = fusewright.load(m, path)
    with torch.inference_mode():
        m.encode.weight.mul_(3)
    torch.testing.assert_close(loaded(X), m(X))


def test_what_changes_no_result_is_no_change(path: Path, either: str) -> None:
    m = _net()
    loaded = fusewright.load(m, path)
    m.requires_grad_(False)
    m.act = nn.ReLU().eval()
    m.config, m.table = Config(), torch.ones(4)
    m.register_buffer("mean", torch.full((4,), 5.0))
    m.encode.weight = m.decode.weight = nn.Parameter(torch.randn(4, 4))
    torch.testing.assert_close(loaded(X), m(X))
    with torch.inference_mode():
        torch.testing.assert_close(loaded(X), m(X))
    m.config.slope = 3.0  # the new one is watched as well
    with pytest.raises(ArtifactError, match=r"slope was 2\.0, is 3\.0"):
        loaded(X)


def test_a_changed_model_is_compiled_if_asked(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    m = _net()
    loaded = fusewright.load(m, path, otherwise="compile")
    m.act = nn.Tanh().eval()
    torch.testing.assert_close(loaded(X), m(X))
    assert "modules: act was " in caplog.text and "This call is compiled" in caplog.text


class Doubling(torch.overrides.TorchFunctionMode):
    """A mode of the user's, which changes results."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if isinstance(found, torch.Tensor) else found


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def test_settings_of_torch_that_change_results_are_noticed(path: Path, default_dtype: None) -> None:
    loaded = fusewright.load(_net(), path)
    with torch.device("meta"), pytest.raises(ArtifactError, match=r"settings of torch .*'meta'"):
        loaded(X)
    with Doubling(), pytest.raises(ArtifactError, match=r"settings of torch .*'Doubling'"):
        loaded(X)
    loaded(X)
    torch.set_default_dtype(torch.float64)
    with pytest.raises(ArtifactError, match=r"were torch\.float32 .*, are torch\.float64"):
        loaded(X)


class Labelled(torch.Tensor):
    """A tensor with a class of its own, whose functions may compute anything."""


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (X.as_subclass(Labelled), r"takes \(a Labelled\)"),
        (X.to_sparse(), r"takes \(a tensor of layout torch\.sparse_coo\)"),
        (torch.nested.nested_tensor([torch.ones(2, 4)], layout=torch.jagged), r"a NestedTensor"),
        (torch.ones(2, 4).to_mkldnn(), r"a tensor of layout torch\._mkldnn"),
        (X.to("meta"), r"takes \(float32\[3, 4\] on meta\)"),
        (X.numpy(), r"takes \(a ndarray\)"),
    ],
)
def test_arguments_that_are_no_ordinary_tensors_are_refused(path: Path, given: Any, says: str) -> None:
    with pytest.raises(ArtifactError, match=says):
        fusewright.load(_net(), path)(given)


def test_a_call_of_another_structure_is_shown_as_it_is_written(path: Path) -> None:
    loaded = fusewright.load(_net(), path)
    with pytest.raises(ArtifactError, match=r"takes \(x=float32\[3, 4\]\); there are: float32\[3, 4\]; scale=0\.0, x=float32"):
        loaded(x=X)
    with pytest.raises(ArtifactError, match=r"takes \(float32\[3, 4\], mask=float32\[4\]\)"):
        loaded(X, mask=torch.ones(4))


def test_a_number_of_another_sign_or_type_is_another_call(path: Path) -> None:
    """Eager gives infinities of the other sign for -0.0."""
    loaded = fusewright.load(_net(), path)
    assert loaded(x=X, scale=0.0).isinf().any()
    for scale in (-0.0, 0, False, None):
        with pytest.raises(ArtifactError, match="no saved program takes"):
            loaded(x=X, scale=scale)


class Elsewhere(torch.Tensor):
    """Stands for a tensor on a device that this machine lacks."""

    device = torch.device("cuda", 1)  # type: ignore[assignment]


def test_tensors_on_two_cards_are_refused() -> None:
    second = torch.ones(2).as_subclass(Elsewhere)
    check_device([X, second, second], None)
    check_device([X, second], torch.device("cuda", 1))
    with pytest.raises(ArtifactError, match=r"one tensor is on cuda:1, another on cuda:0\. Move"):
        check_device([X, second], torch.device("cuda", 0))


def test_equal_models_are_described_alike() -> None:
    assert not list(identity.differences(identity.of_model(_net()).parts, identity.of_model(_net()).parts))


def _quantized(scale: float) -> nn.Module:
    return fusewright.quantize(nn.Sequential(nn.Linear(16, 16)).eval(), [torch.ones(4, 16) * scale], backend="x86_int8")


@pytest.mark.hardware("x86_int8")
def test_a_quantized_model_is_saved_with_its_scales(tmp_path: Path) -> None:
    """It has no mode: `eval` of an exported module raises."""
    pytest.importorskip("torchao", reason="torchao is optional; runs with it: pip install fusewright-int8[quantize]")
    torch.manual_seed(0)
    q = _quantized(1.0)
    fusewright.save(q, tmp_path / "q", torch.randn(4, 16), backend="x86_int8")
    x = torch.randn(4, 16)
    torch.testing.assert_close(fusewright.load(q, tmp_path / "q")(x), q(x))
    with pytest.raises(ArtifactError, match="forward was "):
        fusewright.load(_quantized(7.0), tmp_path / "q")


class Coded(torch.Tensor):
    """Stands for a weight that `quantize_` replaced."""


def test_a_model_quantized_in_place_says_what_it_became(path: Path, tmp_path: Path) -> None:
    m = _net()
    loaded = fusewright.load(m, path)
    m.mean = m.mean.as_subclass(Coded)
    with pytest.raises(ArtifactError, match=r"mean was buffer float32.* is buffer of .*Coded"):
        loaded(X)
    with pytest.raises(ArtifactError, match=r"the weight mean is a Coded; only ordinary tensors .* fusewright\.quantize"):
        fusewright.save(m, tmp_path / "m", X)


CONTAINERS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a value": (lambda: {"a": X}, lambda c: c.update(a=X.clone())),
    "an equal value": (lambda: {"a": 1.0}, lambda c: c.update(a=True)),
    "a key more": (lambda: {"a": 1}, lambda c: c.update(b=1)),
    "a key less": (lambda: {"a": 1, "b": 1}, lambda c: c.pop("b")),
    "the first": (dict, lambda c: c.update(a=1)),
    "an item": (lambda: [X, X], lambda c: c.__setitem__(1, None)),
    "an item more": (list, lambda c: c.append(None)),
    "an attribute of a class": (lambda: type("T", (), {"a": 1}), lambda c: setattr(c, "a", 2)),
}


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("what", CONTAINERS)
def test_entries_are_compared_by_identity(either: str, what: str, held: bool) -> None:
    make, change = CONTAINERS[what]
    container = make()
    same = same_entries([{}, container, [1]], held)
    assert same() and same()
    change(container)
    assert not same()

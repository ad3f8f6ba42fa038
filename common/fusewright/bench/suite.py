"""From a name to a runnable model: suite models, `file.py:function`, dtypes, training steps."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import nn

from fusewright.bench.models import MODELS, Size, instantiate
from fusewright.errors import FusewrightError, nearest
from fusewright.interface import HOST

_Dropout = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

DType: TypeAlias = Literal["fp32", "bf16", "fp16", "amp"]
"""fp32; bf16 and fp16 (module and inputs cast); amp (fp32 weights under bf16 autocast)."""
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

SUITE: tuple[str, ...] = tuple(name for name, spec in MODELS.items() if spec.in_suite)
TRAINABLE: tuple[str, ...] = tuple(name for name, spec in MODELS.items() if spec.labels is not None)


class UnknownModel(FusewrightError, LookupError):
    """The name is neither a model of the suite nor a `file.py:function`; the message suggests the nearest."""


@dataclass(frozen=True)
class Built:
    """A callable with example inputs. `run(fn)` calls `fn` (by default `fn` itself) as a user would at this dtype.

    `extra` holds additional facts from the builder (e.g. a kernel's bytes). `drive` turns `fn` and the inputs into a call if
    that is more than calling `fn` on them.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "fp32"
    extra: Mapping[str, Any] = field(default_factory=dict)
    device: str = HOST
    drive: Callable[..., Callable[[], Any]] | None = None

    @property
    def module(self) -> torch.nn.Module | None:
        return self.fn if isinstance(self.fn, torch.nn.Module) else None

    def run(self, fn: Callable[..., Any] | None = None) -> Any:
        return self.bind(self.fn if fn is None else fn)()

    def bind(self, fn: Callable[..., Any]) -> Callable[[], Any]:
        """A zero-argument call of `fn` on the inputs. Autocast is entered per call, because its weight cache must not outlive
        one."""
        args, kwargs = self.args, dict(self.kwargs)
        if self.drive is not None:
            return self.drive(fn, *args, **kwargs)
        if self.dtype != "amp":
            return (lambda: fn(*args, **kwargs)) if kwargs else (lambda: fn(*args))
        kind = torch.device(self.device).type

        def call() -> Any:
            with torch.autocast(kind, dtype=torch.bfloat16):
                return fn(*args, **kwargs)

        return call


def repeated(built: Built, batch: int) -> Built:
    """Repeat all tensors that it is called with `batch` times along their first dimension."""

    def repeat(x: Any) -> Any:
        return torch.cat([x] * batch) if isinstance(x, torch.Tensor) and x.dim() else x

    return replace(built, args=tuple(map(repeat, built.args)), kwargs={k: repeat(v) for k, v in built.kwargs.items()})


def build(model: str, size: Size = "full", dtype: DType = "fp32", seed: int = 0) -> Built:
    """Build `model` for inference: a name of the suite, or `file.py:function` (which ignores `size` and `seed`).

    The module is in eval mode. Raises `UnknownModel`, or `ImportError` if transformers is missing.
    """
    if ":" in model:
        return cast(_from_file(model), dtype)
    spec = MODELS.get(model)
    if spec is None:
        raise UnknownModel(_unknown(model))
    module, inputs, _ = instantiate(spec, size, seed)
    return cast(Built(model, module, (), inputs), dtype)


def check_name(model: str, train: bool = False) -> None:
    """Raise `UnknownModel` for a name that `build` (or `train_step`) would reject, without building anything."""
    if ":" in model and not model.endswith(".py"):
        _check_file(model)
    elif model not in (TRAINABLE if train else MODELS):
        raise UnknownModel(_unknown(model, TRAINABLE if train else tuple(MODELS)))


def _check_file(ref: str) -> None:
    """Raise `UnknownModel` for errors that show without running the file: it is missing, or not valid Python."""
    path = Path(ref.rpartition(":")[0])
    if not path.is_file():
        raise UnknownModel(f"{ref!r}: there is no file {str(path)!r}")
    _functions(path)


def _functions(path: Path) -> list[str]:
    """Names of the functions in a file, without running it."""
    try:
        parsed = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as e:
        text = f": {e.text.strip()}" if e.text else ""
        raise UnknownModel(f"{path}:{e.lineno}: syntax error, {e.msg}{text}") from None
    except ValueError as e:  # null bytes
        raise UnknownModel(f"{path} is not a Python file: {e}") from None
    except OSError as e:
        raise UnknownModel(f"{path} cannot be read: {e.strerror}") from None
    return [s.name for s in parsed.body if isinstance(s, ast.FunctionDef) and not s.name.startswith("_")]


def _without_function(path: str) -> str:
    """The message for a file without a function name."""
    if not Path(path).is_file():
        return f"there is no file {path!r}; a model of your own is file.py:function"
    functions = _functions(Path(path))
    has = f"it has {', '.join(functions)}" if functions else "it has none, so write one that returns (module, args)"
    return f"{path!r} is a file: name its function too, {path}:{functions[0] if functions else 'function'} ({has})"


def _unknown(model: str, among: tuple[str, ...] = tuple(MODELS)) -> str:
    if model.endswith(".py"):
        return _without_function(model)
    hint = nearest(model, among)
    return f"there is no model {model!r}; {hint}{'' if hint.endswith('?') else '.'} A model of your own is file.py:function"


def _from_file(ref: str) -> Built:
    """`function()` of the file returns (module or fn, args) or (module or fn, args, kwargs)."""
    check_name(ref)
    path_text, _, name = ref.rpartition(":")
    path = Path(path_text).resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UnknownModel(f"{ref!r}: {path.name} is not a Python file")
    loaded = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    sys.modules[path.stem] = loaded
    with _own_errors(path):
        spec.loader.exec_module(loaded)
    function = getattr(loaded, name, None)
    if not callable(function):
        found = tuple(key for key, value in vars(loaded).items() if callable(value) and not key.startswith("_"))
        raise UnknownModel(f"{ref!r}: {path.name} has no function {name!r}; {nearest(name, found)}")
    with _own_errors(path):
        made = function()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        what = f"it returned {type(made).__name__}"
        raise UnknownModel(f"{ref!r}: {name}() must return (module or function, args) or (..., args, kwargs); {what}")
    args = made[1] if isinstance(made[1], tuple) else (made[1],)
    return Built(ref, made[0], args, made[2] if len(made) == 3 else {})


@contextlib.contextmanager
def _own_errors(path: Path) -> Iterator[None]:
    """Convert errors raised by the user's file to one line that names the location in it."""
    try:
        yield
    except Exception as e:  # of any kind, since the file is the user's
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if Path(f.filename) == path]
        where = f"{path.name}:{lines[-1]}" if lines else path.name
        first = str(e).strip().partition("\n")[0]
        raise UnknownModel(f"{where} raised {type(e).__name__}: {first}") from e


def cast(built: Built, dtype: str) -> Built:
    """`built` at `dtype`: the module is cast in place, floating-point inputs are cast; amp leaves both and runs under autocast."""
    if dtype not in get_args(DType):
        raise ValueError(f"there is no dtype {dtype!r}; {nearest(dtype, get_args(DType))}")
    if (half := HALVES.get(dtype)) is not None:
        if built.module is not None:
            built.module.to(half)
        built = cast_inputs(built, half)
    return replace(built, dtype=dtype)


def cast_inputs(built: Built, dtype: torch.dtype) -> Built:
    """The same call with its floating-point inputs at `dtype`."""

    def changed(value: Any) -> Any:
        return _each_tensor(value, lambda t: t.to(dtype) if t.is_floating_point() else t)

    return replace(built, args=changed(built.args), kwargs=changed(dict(built.kwargs)))


def on_device(built: Built, device: str) -> Built:
    """The same call with its tensors on a device; the module is moved in place."""
    if built.module is not None:
        built.module.to(device)

    def moved(value: Any) -> Any:
        return _each_tensor(value, lambda t: t.to(device))

    return replace(built, args=moved(built.args), kwargs=moved(dict(built.kwargs)), device=device)


def _each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` applied to the tensors in its tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_each_tensor(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, change) for key, item in value.items()}
    return value


def flatten_outputs(output: Any) -> list[torch.Tensor]:
    """The tensors of an output in order: tensors, numbers, tuples, lists and mappings are flattened, None is skipped.

    Raises `TypeError` for anything else, so that no output goes unchecked.
    """
    return list(_leaves(output))


def _leaves(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (bool, int, float, complex)):
        yield torch.tensor(output)
    elif isinstance(output, Mapping):
        for item in output.values():
            yield from _leaves(item)
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _leaves(item)
    elif output is not None:
        raise TypeError(f"an output of type {type(output).__name__} cannot be compared")


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a step: `output.loss`, `output["loss"]`, a scalar; for any other output, the mean of its squares."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return found.reshape(())
    parts = [t.float().square().mean() for t in flatten_outputs(output) if t.requires_grad]
    if not parts:
        raise UnknownModel("the model gives nothing that has a gradient: --train needs trainable parameters")
    return torch.stack(parts).sum()


@dataclass
class TrainStep:
    """One training step: forward, loss, backward, AdamW. The batch is fixed, so that losses of contenders are comparable. A
    step that `drops` is timed with dropout and compared without."""

    name: str
    module: torch.nn.Module
    batch: dict[str, Any]
    dtype: str
    compiled: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    device: str = HOST
    drops: bool = False

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4)

    def fork(self) -> TrainStep:
        """An independent copy with the same weights."""
        return replace(self, module=copy.deepcopy(self.module), compiled=None)

    def to(self, device: str) -> TrainStep:
        """The same step on a device; the module is moved in place."""
        built = on_device(Built(self.name, self.module, self.args, self.batch), device)
        return replace(self, batch=dict(built.kwargs), args=built.args, device=device)

    def repeatable(self) -> TrainStep:
        """A copy without dropout, whose calls all give the same loss and gradients."""
        step = self.fork()
        step.module.train(not self.drops)
        return step

    def backward(self) -> torch.Tensor:
        """Run forward and backward; gradients are left in `.grad`. Return the loss (scalar)."""
        self.optimizer.zero_grad(set_to_none=True)
        kind = torch.device(self.device).type
        amp = torch.autocast(kind, dtype=torch.bfloat16) if self.dtype == "amp" else contextlib.nullcontext()
        forward = self.module if self.compiled is None else self.compiled
        with amp:
            loss = loss_of(forward(*self.args, **self.batch))
        loss.backward()
        return loss.detach()

    def __call__(self) -> torch.Tensor:
        loss = self.backward()
        self.optimizer.step()
        return loss

    def loss_and_grads(self) -> list[torch.Tensor]:
        """The loss and every gradient (zeros if a parameter got none), without an optimizer step."""
        loss = self.backward()
        grads = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in self.module.parameters()]
        self.optimizer.zero_grad(set_to_none=True)
        return [loss.clone(), *grads]


def _own_step(built: Built) -> TrainStep:
    """A training step of a user's module; dropout layers are off, so that two steps are comparable."""
    if built.module is None:
        raise UnknownModel(f"{built.name!r} gives {type(built.fn).__name__}; a torch.nn.Module can be trained")
    module = built.module.train()
    for part in module.modules():
        if isinstance(part, _Dropout):
            part.p = 0.0
    return TrainStep(built.name, module, dict(built.kwargs), built.dtype, args=built.args)


def train_step(model: str, size: Size = "full", dtype: DType = "fp32", seed: int = 0) -> TrainStep:
    """The training step of one of `TRAINABLE`, or of a `file.py:function` module, with dropout off. Raises `UnknownModel`."""
    check_name(model, train=True)
    if ":" in model:
        return _own_step(cast(_from_file(model), dtype))
    spec = MODELS[model]
    module, inputs, labels = instantiate(spec, size, seed)
    batch = spec.train_batch if size == "full" else 2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + 1)
        for _ in range(1, batch):
            more, labels_of_more = spec.inputs(module.config, size), spec.labels(module.config, size)  # type: ignore[misc]
            inputs = {k: torch.cat([v, more[k]]) if k in more else v for k, v in inputs.items()}
            labels = {k: torch.cat([v, labels_of_more[k]]) for k, v in labels.items()}
    built = cast(Built(model, module.train(), (), {**inputs, **labels}), dtype)
    return TrainStep(model, module, dict(built.kwargs), dtype)

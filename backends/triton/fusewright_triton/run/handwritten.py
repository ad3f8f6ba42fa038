"""Handwritten kernels: built by the compiler processes, like emitted ones, and launched through the driver's own interface.

    PRODUCT = Kernel("product", "product")                    # a function of kernels/product.py, in Triton or Gluon
    PRODUCT.launch(target, programs, args, constants, num_warps=8, num_stages=4)

`args` are the function's parameters other than `tl.constexpr`, in order: tensors, numbers, `TensorDescriptor` matrices.
Their device decides what happens: on a GPU the kernel is launched on torch's current stream, CPU tensors are computed by
Triton's interpreter, and on torch's meta device the code is only requested, so that it is there when it is needed. An `Order` holds
everything that the code depends on; equal orders are built once per process, and their code goes to the plan cache with the plan.

    @or_else(by_torch)                                        # where this Triton cannot build what `run` launches
    def run(x, weight): ...
"""

from __future__ import annotations

import ast
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import torch

from fusewright import machine
from fusewright.errors import BackendCrashError
from fusewright.plan.ir import call_directly
from fusewright.strict import is_strict
from fusewright.toolkit.ir.types import from_torch
from fusewright_triton.build import binaries, workers
from fusewright_triton.build.binaries import Binary
from fusewright_triton.emit.operators import SIGNATURE
from fusewright_triton.run import call_cache
from fusewright_triton.run.bound import Bound, TensorDescriptor, bind
from fusewright_triton.run.driver import driver
from fusewright_triton.target import Target

log = logging.getLogger("fusewright")

P = ParamSpec("P")
R = TypeVar("R")

Argument: TypeAlias = "torch.Tensor | TensorDescriptor | int | float"
NAMESPACE = "fusewright_triton"
ALIGNED = "/16"
"""Suffix of the type of an argument that is a multiple of 16."""
ONE = "1"
"""The type of a number equal to one, which is compiled in, as Triton does."""
MOST_BOUND = 1024
"""The most sets of sizes for which a process keeps bound arguments."""
SAID = 500
"""How many characters of a compiler's message are shown: the last ones say what is wrong."""
INSTALL = "install the triton that your torch wheel asks for (pip check names it)"
"""The remedy where Triton is missing or refuses."""


class Order(NamedTuple):
    """Everything that the code of a kernel depends on: a function of a file in kernels/, the types of its arguments, its
    constants, Triton's build options."""

    module: str
    function: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    def request(self, target: Target) -> dict[str, Any]:
        """Return the request that `compiler.build` takes."""
        names = parameters(self.module, self.function)
        given = dict(zip(names, self.types, strict=True))
        constants = {**dict(self.constants), **{p: 1 for p, t in given.items() if t == ONE}}
        signature = {p: t.removesuffix(ALIGNED) for p, t in given.items()} | dict.fromkeys(constants, "constexpr")
        return {
            "module": self.module,
            "functions": [self.function],
            "signature": {p: signature[p] for p in parameters(self.module, self.function, all=True)},
            "aligned": [p for p, t in given.items() if t.endswith(ALIGNED)],
            "constants": constants,
            "options": dict(self.options),
            "target": target.compiler,
        }


@functools.cache
def source(module: str) -> str:
    """Return the text of a file in kernels/."""
    return Path(__file__).parents[1].joinpath("kernels", f"{module}.py").read_text()


@functools.cache
def _functions(module: str) -> dict[str, ast.FunctionDef]:
    """Parse the file instead of importing it, which would import Triton."""
    return {f.name: f for f in ast.parse(source(module)).body if isinstance(f, ast.FunctionDef)}


@functools.cache
def parameters(module: str, function: str, all: bool = False) -> tuple[str, ...]:
    """Return the names of a function's parameters that are not `constexpr`, or with `all` of every parameter."""
    args = _functions(module)[function].args.args
    return tuple(a.arg for a in args if all or a.annotation is None or "constexpr" not in ast.unparse(a.annotation))


# ---------------------------------------------------------------- code


class Library:
    """The code that this process has, or is building, for a target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.lock = threading.Lock()
        self.built: dict[Order, Future[Binary]] = {}
        self.again: set[Order] = set()

    def ask(self, order: Order) -> Future[Binary]:
        """Return a future of the code. A compiler process builds it if nobody asked for it before, or once more if the process
        died building it."""
        with self.lock:
            found = self.built.get(order)
            ended = found is not None and found.done() and isinstance(found.exception(), workers.Ended)
            if found is None or (ended and order not in self.again):
                if ended:
                    self.again.add(order)
                answer = workers.pool().submit(order.request(self.target))
                found = self.built[order] = binaries.then(answer, lambda made: binaries.binary(made[0]))
        return found

    def code(self, order: Order) -> Binary:
        """Wait for the code and return it. Raise `Unbuilt` when there is none."""
        found = self.ask(order)
        error = found.exception()
        if error is not None:
            raise Unbuilt(order, error)  # a new exception: the traceback of one that is raised again grows
        return found.result()

    def could_be_built(self, orders: Iterable[Order]) -> dict[Order, Binary]:
        """Return the code of the orders that Triton does not refuse."""
        found = {order: self.ask(order) for order in orders}
        return {order: code.result() for order, code in found.items() if code.exception() is None}

    def add(self, order: Order, code: Binary) -> None:
        """Add code from the plan cache."""
        there: Future[Binary] = Future()
        there.set_result(code)
        with self.lock:
            self.built.setdefault(order, there)


class Unbuilt(workers.BuildError):
    """A handwritten kernel could not be built."""

    def __init__(self, order: Order, why: BaseException) -> None:
        super().__init__(str(why))
        self.kernel = f"{order.function} of kernels/{order.module}.py"
        self.words = str(why).strip()[-SAID:]


def or_else(
    other: Callable[P, R], instead: str = "torch's own calls run instead"
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that launches kernels with a fallback: if Triton cannot build one of them, `other` computes the same
    from the same arguments, and one warning per kernel says so. In a plan compiled with `strict`,
    a `BackendCrashError` is raised instead."""

    def decorated(run: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(run)
        def either(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return run(*args, **kwargs)
            except Unbuilt as e:
                if is_strict():
                    raise BackendCrashError(
                        f"the kernel {e.kernel} cannot be built: {e.words}\nWithout 'strict' {instead}; else {INSTALL}"
                    ) from e
                _warn(e, instead)
            return other(*args, **kwargs)

        return either

    return decorated


_warned: set[str] = set()


def _warn(e: Unbuilt, instead: str) -> None:
    if e.kernel not in _warned:
        _warned.add(e.kernel)
        log.warning("fusewright: the kernel %s cannot be built, and %s: %s", e.kernel, instead, e.words)


@functools.cache
def library(target: Target) -> Library:
    """Return this process's code for `target`."""
    return Library(target)


_noted = threading.local()


@contextmanager
def noting(orders: list[Order]) -> Iterator[None]:
    """Collect in `orders` the kernels that this thread requests on the meta device in this context; do not build them."""
    before = getattr(_noted, "orders", None)
    _noted.orders = orders
    try:
        yield
    finally:
        _noted.orders = before


# ---------------------------------------------------------------- launching


@dataclass(frozen=True)
class Kernel:
    """A function of a file in kernels/."""

    module: str
    function: str

    def launch(
        self, target: Target, programs: int, args: Sequence[Argument], constants: Mapping[str, Any], **options: Any
    ) -> None:
        """Launch; see the module. `options` are those of Triton's compiler. Raise `Unbuilt` when it cannot build the kernel."""
        device = next(_tensor(a).device for a in args if isinstance(a, torch.Tensor | TensorDescriptor))
        if device.type == "cpu":
            _interpreted(self.module, self.function).run(0, programs, [_for_triton(a) for a in args], **constants)
        elif device.type == "meta":
            self._ask(target, args, constants, options)
        elif device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run(target, programs, args, constants, options)
        else:
            self._run(target, programs, args, constants, options)

    def order(self, args: Sequence[Argument], constants: Mapping[str, Any], options: Mapping[str, Any]) -> Order:
        """Return the order of a launch with such arguments."""
        types = tuple(_type(a) for a in args)
        return Order(self.module, self.function, types, tuple(constants.items()), tuple(options.items()))

    def _ask(
        self, target: Target, args: Sequence[Argument], constants: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        order, noted = self.order(args, constants, options), getattr(_noted, "orders", None)
        if noted is None:
            library(target).ask(order)
        else:
            noted.append(order)

    def _run(
        self,
        target: Target,
        programs: int,
        args: Sequence[Argument],
        constants: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        device = torch.cuda.current_device()
        key = (self, device, *[_identity(a) for a in args], *constants.items(), *options.items())
        try:
            bound = _bound[key].pop()
        except (KeyError, IndexError):  # the first of its kind, or other threads are using all of them
            bound = _bind(self.order(args, constants, options), args, target, device)
        bound.place(args)
        stream = machine.current_stream(device)
        blocks = programs * options.get("num_ctas", 1)
        arguments = (bound.function, blocks, 1, 1, bound.threads, 1, 1, bound.shared, stream, bound.params, None)
        if bound.launch(*arguments):
            driver(target.triton).relaunch(self.function, *arguments)
        if (trace := call_cache.active()) is not None:
            trace.launched(bound, blocks, args)
        if len(_bound) >= MOST_BOUND:
            _bound.clear()
        _bound.setdefault(key, []).append(bound)


_bound: dict[tuple[Any, ...], list[Bound]] = {}
_loaded: dict[tuple[int, Order], int] = {}


def _bind(order: Order, args: Sequence[Argument], target: Target, device: int) -> Bound:
    """Bind arguments with the code loaded for the current device."""
    code, d = library(target).code(order), driver(target.triton)
    if (device, order) not in _loaded:
        _loaded[device, order] = d.load(code.code, code.name, code.shared)
    return bind(code, _loaded[device, order], args, [t == ONE for t in order.types], d)


def _tensor(a: torch.Tensor | TensorDescriptor) -> torch.Tensor:
    return a.tensor if isinstance(a, TensorDescriptor) else a


@functools.cache
def _element(dtype: torch.dtype) -> str:
    return SIGNATURE[from_torch(dtype)]


def _type(a: Argument) -> str:
    """Return an argument's type in Triton's notation, and what its value lets the code assume."""
    if isinstance(a, TensorDescriptor):
        return f"tensordesc<{_element(a.tensor.dtype)}{list(a.block)}>"
    if isinstance(a, torch.Tensor):
        return f"*{_element(a.dtype)}{'' if a.data_ptr() % 16 else ALIGNED}"
    if isinstance(a, float):
        return "fp32"
    if a == 1:
        return ONE
    return f"{'i32' if -(1 << 31) <= a < 1 << 31 else 'i64'}{'' if a % 16 else ALIGNED}"


def _identity(a: Argument) -> Any:
    """Return the part of an argument that a launch is bound to: all but addresses."""
    if isinstance(a, torch.Tensor):
        return a.dtype, a.data_ptr() % 16 == 0
    if isinstance(a, TensorDescriptor):
        return a.tensor.dtype, a.tensor.shape, a.tensor.stride(), a.block
    return type(a), a


@functools.cache
def _interpreted(module: str, function: str) -> Any:
    from fusewright_triton.run.interpreter import Simulated

    return Simulated(source(module), [function])


def _for_triton(a: Argument) -> Any:
    """Return an argument in the form that Triton's interpreter takes."""
    if not isinstance(a, TensorDescriptor):
        return a
    from triton.tools import tensor_descriptor

    return tensor_descriptor.TensorDescriptor(a.tensor, list(a.tensor.shape), list(a.tensor.stride()), list(a.block))


# ---------------------------------------------------------------- operators

OPERATORS: dict[str, Callable[..., Any]] = {}
"""Torch operators that launch handwritten kernels, by the name that plans use for them."""
_libraries: list[torch.library.Library] = []


def operator(schema: str, run: Callable[..., Any], meta: Callable[..., Any], told: bool = False) -> None:
    """Define an operator that a plan can name, for GPUs and (interpreted) for CPU tensors. `run` is also called with meta
    tensors, to request its kernels before they are needed; `meta` only computes its result's type. `told`: see
    `call_cache.cached`."""
    name = schema.partition("(")[0]
    own = torch.library.Library(NAMESPACE, "FRAGMENT")
    own.define(schema)
    for key in ("CPU", "CUDA"):
        own.impl(name, run, key)
    own.impl(name, meta, "Meta")
    _libraries.append(own)  # its definitions live as long as it does
    OPERATORS[f"{NAMESPACE}::{name}.default"] = run
    call_directly(f"{NAMESPACE}::{name}.default", functools.partial(call_cache.cached, resolving(run), told))


def resolving(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what is called without torch's dispatcher, so that it gets lazily negated and conjugated views as the dispatcher passes
    them: in memory."""

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*map(_resolved, args), **{name: _resolved(a) for name, a in kwargs.items()})

    return call


def _resolved(a: Any) -> Any:
    return a.resolve_conj().resolve_neg() if isinstance(a, torch.Tensor) else a

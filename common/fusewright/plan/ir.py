"""The instructions of a plan, as data. Fragments consist of them, the cache stores them and `explain` prints them.

Arguments of an instruction are `Ref`s (values by id), plain Python literals, torch dtypes/devices/layouts/memory formats, and
tuples or lists of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from fusewright.interface import Dim, KernelCode, TensorSpec
from fusewright.sizes.expr import NumberOf, OffsetOf, SizeExpr, SizeOf, leaves, symbol, values


@dataclass(frozen=True, slots=True)
class Ref:
    """A value, by its id in the graph (or from `CompileContext.value`)."""

    id: int

    def __repr__(self) -> str:
        return f"%{self.id}"


@dataclass(frozen=True, slots=True)
class Call:
    """Call a torch op by its qualified name, e.g. "aten::add.Tensor" or "mkldnn::_linear_pointwise".

    A name "py::operator.add" calls a function of Python's `operator` on scalars (sizes).
    `prepare`: every input is a constant (a weight) or the output of another such instruction, and the host may keep the result.
    """

    target: str
    args: tuple[Any, ...]
    outs: tuple[int, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    prepare: bool = False
    packed: bool = False
    """With several outs, whether the op returns a tuple; with one out, the value itself is taken."""
    op_id: int | None = None
    """The op of the graph that this instruction implements, for reports."""
    generator: Ref | None = None
    """What it draws random numbers from, an input of the plan; default: the device's own generator."""


DIRECT: dict[str, Callable[[], Callable[..., Any]]] = {}
"""Python operators that plans call directly, by name: what a plan that is being loaded will call. Through torch's dispatcher,
boxing and unboxing twenty arguments takes 10 us."""


def call_directly(target: str, run: Callable[[], Callable[..., Any]]) -> None:
    """Make plans call the function that `run` returns when they are loaded, for an operator whose only kernel it is."""
    DIRECT[target] = run


@dataclass(frozen=True)
class Bound:
    """A call as a launch of native code, which saves the arguments' way through Python.

    `words` are the argument block of the function at `code.address` (see `KernelCode`): a `Ref` stands for the address of its
    tensor, whose memory is as its spec says, or `out` for the result's. A `Dim` or formula is a size. Where a tensor of `types` has
    another type than named there, the operator is called and its result copied.
    """

    code: KernelCode
    words: tuple[Any, ...]
    types: tuple[tuple[Ref, Any], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(x if isinstance(x, Ref) else _size(x) for x in self.words))


Bind: TypeAlias = Callable[["Call", Mapping[int, TensorSpec]], Bound | None]
"""Bind a call of a plan, given what is known of its values; None for one that stays a call. It must not raise."""

BINDS: dict[str, Bind] = {}
"""Operators of one result in fresh memory that plans may launch, by name."""


def launch_directly(target: str, bind: Bind) -> None:
    """Make plans launch calls of an operator where `bind` can."""
    BINDS[target] = bind


@dataclass(frozen=True, slots=True)
class Launch:
    """Run a loop kernel: `kernel` is its structural hash (the code is in the plan's kernel table).

    `inputs` and `outs` are tensors. `sizes` are the values of the kernel's size symbols: ints, or formulas (`SizeExpr`) over
    sizes read from values (`SizeOf`, `OffsetOf`, `NumberOf`) and the graph's symbols. Also accepted, and converted to these: a
    `Dim`, a Ref to a scalar value, ("size", Ref, dim), and ("offset", Ref) for a tensor's storage offset. The host allocates
    output tensors from `out_specs`. `inplace` are (output, input) positions that may share memory if the input dies here; the
    host chooses among them. `updates` are pairs that must share memory: the kernel changes that input in place (an output
    buffer with access "inout"), and the output is that same tensor afterwards. Such an input is a temporary that nothing else
    reads. `into` are pairs of an output and a tensor in whose memory it is made, which the kernel does not read.
    """

    kernel: str
    inputs: tuple[Ref, ...]
    outs: tuple[int, ...]
    sizes: tuple[Any, ...] = ()
    scalars: tuple[Any, ...] = ()
    inplace: tuple[tuple[int, int], ...] = ()
    updates: tuple[tuple[int, int], ...] = ()
    op_ids: tuple[int, ...] = ()
    into: tuple[tuple[int, Ref], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(map(_size, self.sizes)))
        object.__setattr__(self, "scalars", tuple(x if isinstance(x, Ref) else _size(x) for x in self.scalars))

    @property
    def written(self) -> dict[int, int]:
        """The tensors that the launch changes, each with the output that it then is."""
        pairs = (*((o, self.inputs[k]) for o, k in self.updates), *self.into)
        return {r.id: self.outs[o] for o, r in pairs}

    @property
    def located(self) -> set[int]:
        """Values whose storage offset the launch reads."""
        return {a.value for s in self.sizes for a in leaves(s) if isinstance(a, OffsetOf)}


def _size(x: Any) -> Any:
    """Normalize a size from any of its accepted forms."""
    match x:
        case Dim():
            return x.expr
        case Ref():
            return symbol(NumberOf(x.id))
        case ("size", Ref() as r, dim):
            return symbol(SizeOf(r.id, dim))
        case ("offset", Ref() as r):
            return symbol(OffsetOf(r.id))
    return x


@dataclass(frozen=True, slots=True)
class CallPython:
    """Call an opaque function of a backend: tensors in, a sequence of tensors out. Never cached on disk."""

    fn: Callable[..., Sequence[Any]] = field(compare=False)
    args: tuple[Any, ...]
    outs: tuple[int, ...]
    name: str = "region"
    op_ids: tuple[int, ...] = ()


Instruction: TypeAlias = Call | Launch | CallPython


Run: TypeAlias = Callable[[list[Any]], Any]
"""A compiled plan: takes (and empties) a list of inputs."""


def refs(arg: Any) -> list[int]:
    """Ids of every value mentioned in `arg`, in order, with repeats."""
    found: list[int] = []
    _collect((arg,), found)
    return found


def _collect(args: Iterable[Any], found: list[int]) -> None:
    for a in args:  # most are numbers and names; skip the recursive call
        if isinstance(a, Ref):
            found.append(a.id)
        elif isinstance(a, tuple | list):
            _collect(a, found)
        elif isinstance(a, SizeExpr):
            found.extend(values(a))


def reads(i: Instruction) -> list[int]:
    """Ids of every value that the instruction reads."""
    found: list[int] = []
    match i:
        case Call():
            _collect(i.args, found)
            _collect((v for _, v in i.kwargs), found)
            _collect((i.generator,), found)
        case Launch():
            for given in (i.inputs, i.sizes, i.scalars, i.into):
                _collect(given, found)
        case CallPython():
            _collect(i.args, found)
    return found


def reads_content(i: Instruction) -> list[int]:
    """Ids of every value that the instruction reads more of than its sizes and its place in memory."""
    return [r.id for r in (*i.inputs, *i.scalars) if isinstance(r, Ref)] if isinstance(i, Launch) else reads(i)


COPY = "aten::copy_.default"


def copied(i: Instruction) -> tuple[int, int] | None:
    """The (target, source) of a copy into a tensor, or None."""
    if isinstance(i, Call) and i.target == COPY and all(isinstance(a, Ref) for a in i.args[:2]):
        return i.args[0].id, i.args[1].id
    return None

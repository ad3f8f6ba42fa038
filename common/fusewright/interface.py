"""The lowering interface: everything that a backend receives and returns. Public and versioned.

A backend subclasses :class:`Backend`. It receives read-only value objects (`OpView`, `Region`, `TensorSpec`), never a node of
torch's graph, and returns a :class:`Compiled`: an opaque callable, or a `Fragment` of instructions (`fusewright.plan.ir`).
"""

from __future__ import annotations

import abc
import contextlib
import enum
import sys
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch

from fusewright.sizes.expr import SizeExpr, symbol

INTERFACE: tuple[int, int] = (1, 19)
"""(major, minor) of this interface. Minor versions only add members with defaults."""

OPSET = 1
"""Version of the closed op table (names and semantics) in `fusewright.ops`."""


class Why(enum.Enum):
    """Reason codes. `OK` and `CARRIED` both claim the op; `CARRIED` means that the region will run eager's own call of it, and
    reports count it apart from lowered ops. `CARRIED` since interface 1.3."""

    OK = "ok"
    CARRIED = "carried"
    NO_LOWERING = "no_lowering"
    DTYPE = "dtype"
    LAYOUT = "layout"
    RANK = "rank"
    DYNAMIC_SHAPE = "dynamic_shape"
    ATTR = "attr"
    DEVICE = "device"
    DEVICE_FEATURE = "device_feature"
    TOO_SMALL = "too_small"
    UNPROFITABLE = "unprofitable"
    DENIED = "denied"
    DECLINED = "declined"
    CRASHED = "crashed"
    SUPPORTS_RAISED = "supports_raised"


@dataclass(frozen=True)
class Verdict:
    """An answer with its reason. Truthy exactly when `why` is `Why.OK` or `Why.CARRIED`."""

    why: Why
    detail: str = ""

    def __bool__(self) -> bool:
        return self.why in (Why.OK, Why.CARRIED)

    def __str__(self) -> str:
        return f"{self.why.value}: {self.detail}" if self.detail else self.why.value


YES = Verdict(Why.OK)


class Decline(Exception):
    """Raised by `Backend.compile` when a claimed region cannot be lowered after all. The host plans again without those ops.

    `ops` names the ids to deny; empty means every op of the region.
    """

    def __init__(self, detail: str, why: Why = Why.DECLINED, ops: Sequence[int] = ()) -> None:
        super().__init__(detail)
        self.why = why
        self.detail = detail
        self.ops = tuple(ops)


@dataclass(frozen=True, init=False)
class Dim:
    """A symbolic size: a formula over named symbols, and `hint`, the size seen when tracing."""

    expr: SizeExpr
    hint: int
    lo: int = 0
    hi: int | None = None

    def __init__(self, expr: SizeExpr | str, hint: int, lo: int = 0, hi: int | None = None) -> None:
        """A string `expr` is the name of a symbol."""
        fields = {"expr": symbol(expr) if isinstance(expr, str) else expr, "hint": hint, "lo": lo, "hi": hi}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def symbol(self) -> str:
        """The formula as text, for display."""
        return str(self.expr)

    def __str__(self) -> str:
        return str(self.expr)


Size: TypeAlias = int | Dim

HOST = "cpu"
"""Torch's name for the host device, whose memory this process accesses directly. Since interface 1.3."""


def is_static(sizes: Sequence[Size]) -> bool:
    """True when no size is symbolic."""
    return all(isinstance(s, int) for s in sizes)


def hint(size: Size) -> int:
    """The size seen when tracing, for cost estimates only."""
    return size if isinstance(size, int) else size.hint


@dataclass(frozen=True)
class TensorSpec:
    """Metadata of a tensor. `stride` counts elements. `const` marks a weight or buffer that needs no gradient and, in
    inference, everything computed from such tensors alone."""

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: str = HOST
    const: bool = False

    @property
    def static(self) -> bool:
        return is_static(self.shape) and is_static(self.stride)

    @property
    def rank(self) -> int:
        return len(self.shape)

    def numel_hint(self) -> int:
        n = 1
        for s in self.shape:
            n *= hint(s)
        return n

    def bytes_hint(self) -> int:
        return self.numel_hint() * self.dtype.itemsize


@dataclass(frozen=True)
class Value:
    """A value of the graph. `id` is unique in the graph; for a scalar, `spec` is None and `dim` holds its symbolic size."""

    id: int
    spec: TensorSpec | None
    dim: Dim | None = None


Scalar: TypeAlias = (
    int | float | bool | complex | str | torch.dtype | torch.device | torch.layout | torch.memory_format | None
)
Arg: TypeAlias = "Value | Scalar | tuple[Arg, ...]"


@dataclass(frozen=True)
class OpView:
    """One op of the graph, read-only. `op` is a row name of the opset, or the full ATen name of an opaque op.

    `args` are all arguments in the order of the canonical schema, defaults filled in; `argnames` names them.
    """

    id: int
    op: str
    target: str
    argnames: tuple[str, ...]
    args: tuple[Arg, ...]
    outs: tuple[Value, ...]
    users: tuple[int, ...] = ()
    source: str = ""

    def arg(self, name: str) -> Any:
        """The argument called `name`. KeyError when the op has none."""
        try:
            return self.args[self.argnames.index(name)]
        except ValueError:
            raise KeyError(f"{self.op} has no argument {name!r}; it has {', '.join(self.argnames)}") from None

    def inputs(self) -> Iterator[Value]:
        """Every value among the arguments, in order, repeats included."""
        return iter(self._inputs)

    @cached_property
    def _inputs(self) -> tuple[Value, ...]:
        return tuple(_values(self.args))

    @property
    def out(self) -> Value:
        return self.outs[0]


def _values(args: tuple[Arg, ...]) -> Iterator[Value]:
    for a in args:
        if isinstance(a, Value):
            yield a
        elif isinstance(a, tuple):
            yield from _values(a)


Phase: TypeAlias = Literal["infer", "forward", "backward"]


@dataclass(frozen=True)
class Region:
    """A convex group of ops in topological order. `inputs` come from outside the region, `outputs` are used outside it."""

    name: str
    ops: tuple[OpView, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    phase: Phase = "infer"

    @property
    def constants(self) -> frozenset[int]:
        """Ids of values that depend on weights alone, so results computed from them may be prepared (see
        `fusewright.plan.ir.Call`). Empty in training, where weights change. Since interface 1.3."""
        if self.phase != "infer":
            return frozenset()
        values = (*self.inputs, *(v for op in self.ops for v in (*op.inputs(), *op.outs)))
        return frozenset(v.id for v in values if v.spec is not None and v.spec.const)

    @property
    def op_names(self) -> str:
        """The distinct names of the ops, for messages."""
        return ", ".join(dict.fromkeys(op.op for op in self.ops))


@dataclass(frozen=True)
class GraphView:
    """A whole graph, read-only: ops in topological order and the values that the graph returns."""

    ops: tuple[OpView, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    phase: Phase = "infer"


@dataclass(frozen=True)
class Device:
    """A device found by a probe: its type (torch's name), architecture, features and driver."""

    type: str
    arch: str
    features: frozenset[str] = frozenset()
    driver: str = ""
    simulated: bool = False


@dataclass(frozen=True)
class Splits:
    """Thresholds for splitting a loop into parts that run in parallel. They depend on sizes alone, so results do not depend on
    the number of workers. Since interface 1.3."""

    parts: int = 32
    """Parts to split a long row into."""
    long_row: int = 1 << 15
    """Row length, in elements, from which a second launch pays."""
    few_points: int = 16
    """With more rows than this, every worker has work without a split."""
    few_columns: int = 512
    """Column reductions are split up to this many adjacent columns."""
    passes_again: int = 512
    """Up to this many columns, each pass over long columns reads its operands from memory again. Since interface 1.5."""
    held_row: int = sys.maxsize
    """The longest row whose elements are at hand for a second pass. Since interface 1.7."""
    held_column: int = 0
    """The longest row across memory that a kernel holds, so that what needs it and its reduction joins. Since interface 1.18."""
    column_rows: int = 2048
    """Minimum length of such a column, in elements."""
    column_elements: int = 1 << 18
    """Minimum number of elements over all columns."""
    scan_parts: int = 256
    """Parts of a scanned row; a single worker combines them."""


@dataclass(frozen=True)
class DevicePolicy:
    """What the host may assume of a device. The defaults are safe for any device and optimal for none. Since interface 1.3."""

    arena: int = 0
    """Alignment in bytes of results within the arena, one block of memory per running call; 0: each result is its own tensor.
    Kernels reuse memory of earlier calls, so work on the device must run in the order of the calls."""
    workers: Callable[[], int] | None = None
    """Number of compute threads: passed to every native kernel (`KernelCode.address`) and part of the keys of plans and of
    measured choices. None: one thread, and nothing depends on it."""
    splits: Splits = Splits()
    wider: Callable[[str, torch.dtype, int], torch.dtype | None] | None = None
    """The type in which to compute a product, convolution or attention, given its row's name, its type and its number of rows (of a
    matrix of fixed size, else `sys.maxsize`): a device may multiply another type several times as fast. Operands are widened, and
    results are rounded to their own type. None: its own. Since interface 1.7."""
    multiple: Callable[[torch.dtype, int, int, int], int] | None = None
    """What the lengths of rows in a matrix product of a training step should be multiples of, given its type, M, K and N: zeros are
    written behind others, where libraries have no fast kernels for them. 1: any. Since interface 1.12."""
    adds_bias: bool = False
    """Whether a convolution adds its bias in a pass of its own, so that kernels which read its result may add it instead, and a
    training step saves it without. Since interface 1.19."""
    branches: frozenset[torch.dtype] = frozenset()
    """Types in which convolutions of one input with constant weights that are added up become one in inference. Since interface
    1.11."""
    batches: bool = False
    """Whether a batched product of fp32, fp64 or complex matrices that lie between each other in memory is faster with copies of
    them. Since interface 1.13."""
    contracts: Callable[[torch.dtype, int, int, int, int], bool] | None = None
    """Whether a sum of products of broadcast operands is faster as matrix products, given its type, how many matrices they are, and
    M, K and N. None: never. Since interface 1.14."""
    gathers: Callable[[torch.dtype, int, int, int, int], bool] | None = None
    """Whether a grouped product is faster in inference as products of single rows with gathered matrices, given its type, how many
    rows and how many matrices there are, K and N. None: never. Since interface 1.15."""
    eager: tuple[Any, ...] = ()
    """Conditions under which the device's eager is faster than a kernel (`fusewright.toolkit.fuse.eager.Condition`)."""
    flops_per_second: float = 2e11
    bytes_per_second: float = 2e10
    call_seconds: float = 3e-6
    """Rough figures for time estimates; only ratios between ops matter."""
    limit: Callable[[int], int] | None = None
    """Limit how many threads share the calling thread's work; return the previous limit. Since interface 1.4."""
    worth_waking: float = 0.0
    """Estimated seconds of an op, by the figures above, from which waking more threads pays off, even if one has to wait for a
    core. A plan of shorter ops only runs on the calling thread, where `limit` is given. Since interface 1.4."""

    def count_workers(self) -> int:
        """The current number of compute threads."""
        return 1 if self.workers is None else self.workers()


@dataclass(frozen=True)
class Unavailable:
    """Why a backend cannot run here, and how to fix it."""

    reason: str
    fix: str = ""


@dataclass(frozen=True)
class Opaque:
    """A compiled region as one callable: takes the tensors of `Region.inputs`, returns a tuple in the order of
    `Region.outputs`.

    It must not change or alias its inputs. It becomes one instruction of the plan, and the plan is not cached on disk.
    """

    fn: Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Fragment:
    """A compiled region as instructions (see `fusewright.plan.ir`) that the host splices into the flat plan.

    `notes` maps an op id to a few words on how it was lowered; `explain` shows them.
    `kernels` maps hashes to the kernels that its `Launch`es name: loop kernels (`fusewright.toolkit.ir.Kernel`), or anything
    else that `Backend.load` can compile, once for all fragments of a graph.
    """

    instructions: tuple[Any, ...]
    notes: Mapping[int, str] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelCode:
    """A loaded loop kernel. `call(tensors, sizes, scalars)` runs it on the kernel's buffers in order; the caller allocates the
    outputs.

    `address`, if set, is that of a C function `int64 f(int64 *block, int64 workers)`, whose block holds the addresses of the
    buffers, then the sizes, then the scalars (floats as the bits of a double). It returns 0 on success, else an error code that
    `error(code, block)` turns into the exception that eager would raise. The function stays loaded as long as `call` is
    referenced.

    `kernel` is the source of the code. If it has `buffers`, `symbols` and `scalars`, as loop kernels do, launches in plans
    loaded from disk are checked against them. Since interface 1.2.
    """

    call: Callable[..., None]
    address: int | None = None
    error: Callable[[int, Sequence[int]], Exception] | None = None
    kernel: Any = None
    source: Callable[[], str] | None = None
    """The source text of the code, for display. Since interface 1.3."""


Compiled: TypeAlias = Opaque | Fragment


class Recorder(Protocol):
    """Records work on a device as a graph of its driver and replays it whole, for plans of fixed shapes."""

    device_type: str

    def stream(self, device: str) -> Hashable | None:
        """The key of the current stream. Recordings of one stream may share memory. None: recording and replay are not possible
        here and now."""
        ...

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: Any = True
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """Record `run`. Return its results and a function that replays it and refills those results. `warm`: run it once
        before. `shared`: other recordings of this stream may use its memory once the work queued behind a replay is done; or
        what `pool` returned, if the recorder has it (see `PoolingRecorder`).

        Raises `RuntimeError` (and leaves nothing behind) when something in `run` cannot be recorded.
        """
        ...

    def seconds(self, run: Callable[[], Any]) -> float:
        """Return the device time of one call, from a short measurement."""
        ...


class Number(int):
    """A number that a recorded run is given and that differs from call to call. Launches alone take it, as one of their sizes.
    `uses`: what the recorder's launches note of it while they are recorded. Since interface 1.17."""

    uses: list[Any]

    def __new__(cls, value: int) -> Number:
        made = super().__new__(cls, value)
        made.uses = []
        return made


@runtime_checkable
class PoolingRecorder(Recorder, Protocol):
    """A recorder of plans in pieces: those between collectives, or between what cannot be recorded. Since interface 1.8."""

    def pool(self) -> Any:
        """Return memory for recordings that run in the order in which they were made, to be given to `record` as `shared`."""
        ...


@runtime_checkable
class DrawingRecorder(Recorder, Protocol):
    """A recorder of plans that draw from generators that they are given, as in training with checkpoints. Since interface 1.16."""

    def record_drawing(
        self, run: Callable[[], Sequence[torch.Tensor]], shared: Any, generators: Sequence[torch.Generator]
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """Record `run`, which also draws from these generators, like `record`, without running it before. The replay draws what
        `run` would from the states that the generators are in then, and advances them alike; recording does not change them."""
        ...


@runtime_checkable
class CopyingRecorder(Recorder, Protocol):
    """A recorder whose recordings copy inputs and results themselves, which takes the host less. Since interface 1.9."""

    def record_with_copies(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: Any, inputs: Mapping[int, torch.Tensor],
        returned: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> tuple[Sequence[torch.Tensor], Callable[[list[Any]], Sequence[torch.Tensor] | None]] | None:  # fmt: skip
        """Record `run`, which draws no random numbers, like `record`. The replay takes a list of arguments, copies those at the
        positions `inputs` into the given buffers first, and copies what `returned` selects of the results of `run` into fresh
        memory, which it returns; all are dense tensors of the current device. It does nothing and returns None where it cannot.
        None: this recorder has no such recordings here."""
        ...


@runtime_checkable
class WritingRecorder(CopyingRecorder, Protocol):
    """A copying recorder whose recordings also write results where each call allocates them. Since interface 1.9."""

    def record_written(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: Any, inputs: Mapping[int, torch.Tensor],
        returned: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        written: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    ) -> tuple[Sequence[torch.Tensor], Callable[[list[Any]], Sequence[torch.Tensor] | None]] | None:  # fmt: skip
        """Record `run` like `record_with_copies`, and then `written`, which makes dense tensors of the results of `run`. The replay
        allocates those and has them written there; it returns them before the copies. None: this is not possible here."""
        ...


@runtime_checkable
class NumberRecorder(WritingRecorder, Protocol):
    """A copying recorder that also finds numbers among the `inputs`: its replays pass the argument at that position to the launches
    that take the `Number`, and do nothing and return None where they cannot. Since interface 1.17."""

    def takes_numbers(self) -> bool:
        """Whether it can do so here."""
        ...

    def record_with_numbers(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: Any, numbers: Mapping[int, Number]
    ) -> tuple[Sequence[torch.Tensor], Callable[[list[Any]], bool]]:
        """Record `run`, which may draw random numbers, like `record`. The replay takes a list of arguments, with those to be passed
        on at the positions `numbers`. It does nothing and returns False where it cannot."""
        ...


@dataclass
class RuleLog:
    """The rewrite rules that may still apply to a graph, and how often each did. `disabled` holds ids that are switched off,
    `fuel` limits the total number of rewrites (None: no limit). Since interface 1.3."""

    disabled: Collection[str] = ()
    fuel: int | None = None
    hits: Counter[str] = field(default_factory=Counter)
    spent: int = 0

    def allows(self, id: str) -> bool:
        """Whether a rule may be applied now."""
        return id not in self.disabled and (self.fuel is None or self.spent < self.fuel)

    def hit(self, *ids: str) -> None:
        """Count one rewrite and the rules that took part in it."""
        self.hits.update(ids)
        self.spent += 1

    def copy(self) -> RuleLog:
        """Return a copy, for an attempt that may be repeated."""
        return RuleLog(self.disabled, self.fuel, Counter(self.hits), self.spent)


class CompileContext(Protocol):
    """What the host offers while a region is compiled."""

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def rules(self) -> RuleLog:
        """The log that limits and counts a backend's own rewrite rules, as it does the host's. Since interface 1.3."""
        ...

    @property
    def device(self) -> Device: ...

    def value(self, spec: TensorSpec | None) -> Value:
        """Return a fresh temporary value for a fragment."""
        ...

    def aten(self, op: OpView) -> Any:
        """Return the instruction that runs `op` exactly as eager does."""
        ...

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Any]]) -> str:
        """Return the name of the fastest candidate, from a short measurement that is cached under `key` across processes."""
        ...

    def provisional(self) -> None:
        """Declare this lowering valid for this process only: its plan is not cached. Since interface 1.2."""
        ...


@dataclass(frozen=True)
class LayerAccuracy:
    """The effect of quantization on one layer's result: the signal-to-quantization-noise ratio in dB with the whole model
    quantized (`sqnr`), and the layer's number of multiplications. Since interface 1.3."""

    name: str
    op: str
    shape: tuple[int, ...]
    sqnr: float
    work: int


@dataclass(frozen=True)
class QuantizationReport:
    """Layers in model order, layers kept in floating point with the reason, and the ratio of the whole model in dB. Since
    interface 1.3."""

    recipe: str
    layers: tuple[LayerAccuracy, ...]
    stayed: Mapping[str, str]
    sqnr: float


class Quantization(Protocol):
    """What `fusewright.quantize` and the command line need from a backend. Since interface 1.3."""

    recipes: Mapping[str, str]
    """Name of a recipe -> a one-line description."""

    def quantize(
        self, model: torch.nn.Module, inputs: Sequence[Any], recipe: str, *, keep: Sequence[str], dynamic_batch: bool
    ) -> torch.nn.Module:
        """Return the model with quantize and dequantize ops, for `torch.compile` with this backend. Each of `inputs` is a
        tensor, a tuple of arguments or a dict of keyword arguments; `keep` names modules (fnmatch) that stay in floating point."""
        ...

    def report(self, model: torch.nn.Module, quantized: torch.nn.Module, inputs: Sequence[Any]) -> QuantizationReport:
        """Report where quantization costs accuracy."""
        ...

    def kernels(self, op: str, sizes: Sequence[Any]) -> Mapping[str, Callable[[], Any]]:
        """Return bare calls of each engine for a quantized product, for benchmarks: "linear" of (m, k, n), "conv" of (input,
        weight, stride, groups)."""
        ...


class Backend(abc.ABC):
    """The lowering of one vendor. `name` is the name given to `torch.compile`; see docs/interface.md for a walk-through."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    interface: ClassVar[tuple[int, int]] = INTERFACE
    opset: ClassVar[int] = OPSET
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of this backend beyond the common ones: name -> default. The type of the default is the type of the option."""
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """Allowed values of those options that have only a few: name -> values. Since interface 1.4."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables that this backend reads, `FUSEWRIGHT_...` -> one line of help, shown by `fusewright config`. Since
    interface 1.4."""
    rules: ClassVar[Sequence[str]] = ()
    """Rule ids that this backend checks with `ctx.rules`, beyond those of its `Row`s; the option `disable_rules` accepts no
    others. Since interface 1.4."""
    priority: ClassVar[int] = 0
    """Rank for `backend="fusewright"` among the backends that work on a device type. 0: never picked automatically, only used
    by name."""

    constant_masks: ClassVar[bool] = False
    """Whether constant attention masks are simplified before lowering: dropped if they mask nothing, turned into `is_causal` if
    they mask the future."""
    batched_attention: ClassVar[bool] = False
    """Whether attention of other than four dimensions becomes attention of [batch, heads, length, width] where no gradients are
    needed. Since interface 1.10."""
    channels_last_training: ClassVar[bool] = False
    """Whether images of half-precision training steps lie channels-last between convolutions; decided before gradients are
    traced. Since interface 1.5."""
    row_major_training: ClassVar[bool] = False
    """Whether residual streams of training steps that begin as transposed images are row-major; decided before gradients are
    traced. Since interface 1.11."""
    real_views: ClassVar[bool] = False
    """Whether a view op in a region always returns a view of its input's memory. If not, eager makes the views that the caller
    sees."""

    shows_constants: ClassVar[bool] = False
    """Whether ops that depend on weights alone share a region with their readers, so that the backend sees how a weight is
    computed. They are prepared either way. Since interface 1.3."""

    widened: ClassVar[frozenset[str]] = frozenset()
    """Names of ops whose results from weights are computed once, however much more room than the weights they take. Since
    interface 1.6."""

    namespaces: ClassVar[Sequence[str]] = ()
    """Namespaces of torch operators that its plans call and the opset lacks, e.g. its own. A plan that calls operators of any
    other namespace, not called by the graph either, is not cached on disk. Since interface 1.2."""

    def __init__(self, device: Device | None = None, options: Mapping[str, Any] | None = None) -> None:
        """`options` are the checked values of the options that this class declares."""
        self.device = device
        self.values: Mapping[str, Any] = {**type(self).options, **(options or {})}

    @classmethod
    @abc.abstractmethod
    def probe(cls) -> Device | Unavailable:
        """Find the device to run on. Must not raise and must be cheap; import vendor libraries here, not at module level."""

    @classmethod
    def simulated(cls, options: Mapping[str, Any]) -> Device | Unavailable:
        """The device for `options={"simulate": True}`: this backend's own code on the host's tensors, without its hardware.

        `options` are the checked values of this class's options. Raises `OptionError` if they name no device.
        """
        return Unavailable(f"{cls.name} has no simulated device")

    @classmethod
    def lowers(cls) -> Sequence[str] | None:
        """Row names of the opset that this backend can lower, for reports; None if unknown."""
        return () if cls.supports is Backend.supports else None

    @classmethod
    def quantization(cls) -> Quantization | None:
        """How to quantize models for this backend; None: not supported. Since interface 1.3."""
        return None

    @classmethod
    def remark(cls) -> str:
        """What `doctor` shows beside the device: parts that are present or missing. Since interface 1.3."""
        return ""

    def policy(self) -> DevicePolicy:
        """What the host may assume of the device. Since interface 1.3."""
        return DevicePolicy()

    def prepare(self) -> None:  # noqa: B027 (by default there is nothing to start)
        """Called before a graph for this device is traced: start slow work, e.g. compiler processes, that can run alongside.
        Whether anything will need compiling is not known yet. Since interface 1.1."""

    def tracing(self, symbolic: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which a graph is traced, with tensors of `symbolic` sizes or not: torch chooses among its kernels there.
        Since interface 1.17."""
        return contextlib.nullcontext()

    def supports(self, op: OpView) -> Verdict:
        """Whether this backend claims `op`. Must be pure and use metadata only; every refusal carries a reason."""
        return Verdict(Why.NO_LOWERING)

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        """Lower a claimed region. Raise `Decline` to give it back; any other exception counts as a bug of the backend."""
        raise Decline("this backend compiles nothing", Why.NO_LOWERING)

    def profitable(self, region: Region) -> Verdict:
        """Whether lowering the region is likely to beat eager."""
        return YES

    def group(self, graph: GraphView, claimed: frozenset[int]) -> Sequence[frozenset[int]] | None:
        """Group claimed ops into regions, as sets of op ids, or return None for the host's maximal convex ones. The host checks
        convexity."""
        return None

    def load(self, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        """Compile or load all kernels of a graph's fragments; both maps are keyed by structural hash."""
        raise NotImplementedError(f"{self.name} makes no loop kernels")

    def recorder(self) -> Recorder | None:
        """How to record and replay whole plans on this device; None: not supported."""
        return None

    def store(self, kernels: Sequence[str]) -> bytes | None:
        """Serialize the loaded code of these kernels for the disk cache; None keeps plans that use them out of the cache."""
        return None

    def restore(self, data: bytes, kernels: Sequence[str]) -> Mapping[str, KernelCode]:
        """Load code serialized by `store` in another process with the same fingerprint. Raises `ValueError` if it does not fit."""
        raise ValueError(f"{self.name} stores no code")

    def fingerprint(self) -> str:
        """Everything besides the graph that compiled code depends on; part of every cache key. Must be equal in all processes."""
        versions = f"{self.name}-{self.interface[0]}.{self.interface[1]}-{self.opset}"
        d = self.device
        if d is None:
            return versions
        features = ",".join(sorted(d.features))  # the order of a set differs between processes
        return f"{versions}-{d.type}-{d.arch}-{d.driver}{' simulated' * d.simulated}-{features}"

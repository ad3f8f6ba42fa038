"""The lowering interface: everything that a backend sees and gives back. Public and versioned.

A backend subclasses :class:`Backend`. It is shown read-only value objects (`OpView`, `Region`, `TensorSpec`), never a
node of torch's graph, and returns a :class:`Compiled`: an opaque callable, or a `Fragment` of instructions
(`fusewright.plan.ir`).
"""

from __future__ import annotations

import abc
import enum
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import torch

from fusewright.sizes.expr import SizeExpr, symbol

INTERFACE: tuple[int, int] = (1, 5)
"""(major, minor) of this interface. A minor only adds members with defaults."""

OPSET = 1
"""Version of the closed table of ops (names and semantics) in `fusewright.ops`."""


class Why(enum.Enum):
    """Reason codes. `OK` and `CARRIED` mean yes: the second claims an op only so that eager's own call of it may lie inside a
    region. Reports count such an op apart from those that are lowered. `CARRIED` since interface 1.3."""

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
    """Raised by `Backend.compile` when a claimed region cannot be lowered after all. The host plans again without those
    ops.

    `ops` names the ids that are to be denied; empty means every op of the region.
    """

    def __init__(self, detail: str, why: Why = Why.DECLINED, ops: Sequence[int] = ()) -> None:
        super().__init__(detail)
        self.why = why
        self.detail = detail
        self.ops = tuple(ops)


@dataclass(frozen=True, init=False)
class Dim:
    """A symbolic size: a formula of named symbols, and `hint`, the size seen when tracing."""

    expr: SizeExpr
    hint: int
    lo: int = 0
    hi: int | None = None

    def __init__(self, expr: SizeExpr | str, hint: int, lo: int = 0, hi: int | None = None) -> None:
        """Text is the name of a symbol."""
        fields = {"expr": symbol(expr) if isinstance(expr, str) else expr, "hint": hint, "lo": lo, "hi": hi}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def symbol(self) -> str:
        """The formula as text, for people."""
        return str(self.expr)

    def __str__(self) -> str:
        return str(self.expr)


Size: TypeAlias = int | Dim

HOST = "cpu"
"""Torch's name for the device whose memory this process itself reads and writes. Since interface 1.3."""


def is_static(sizes: Sequence[Size]) -> bool:
    """True when no size is symbolic."""
    return all(isinstance(s, int) for s in sizes)


def hint(size: Size) -> int:
    """The size seen when tracing, for cost estimates only."""
    return size if isinstance(size, int) else size.hint


@dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor. `stride` counts elements. `const` marks a weight or buffer that no gradient flows to, and in
    inference what is made of such alone."""

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
    """A value of the graph: `id` is unique in the graph; `spec` is None for a scalar, whose symbolic size is then in
    `dim`.
    """

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
        yield from _values(self.args)

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
    """A convex group of ops in topological order. `inputs` come from outside it, `outputs` are used outside it."""

    name: str
    ops: tuple[OpView, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    phase: Phase = "infer"

    @property
    def constants(self) -> frozenset[int]:
        """Ids of the values that depend on weights alone, so that what a backend makes of them may be prepared (see
        `fusewright.plan.ir.Call`). None in training, which changes its weights. Since interface 1.3."""
        if self.phase != "infer":
            return frozenset()
        values = (*self.inputs, *(v for op in self.ops for v in (*op.inputs(), *op.outs)))
        return frozenset(v.id for v in values if v.spec is not None and v.spec.const)

    @property
    def op_names(self) -> str:
        """The names of its ops, each once, for messages."""
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
    """A device that answered the probe: its type by torch's name, its architecture, what it has, its driver."""

    type: str
    arch: str
    features: frozenset[str] = frozenset()
    driver: str = ""
    simulated: bool = False


@dataclass(frozen=True)
class Splits:
    """When a loop is cut into parts that run beside each other. Sizes alone decide, so that results do not depend on how many
    workers there are. Since interface 1.3."""

    parts: int = 32
    """Parts of a long row."""
    long_row: int = 1 << 15
    """Elements of a row from which a second launch is worth it."""
    few_points: int = 16
    """With more rows than this there is work for every worker as it is."""
    few_columns: int = 512
    """Points that are neighbours in memory, up to which rows that run across memory are cut."""
    column_rows: int = 2048
    """Elements of such a row at least."""
    column_elements: int = 1 << 18
    """Elements of all of them at least."""
    scan_parts: int = 256
    """Parts of a row that is counted along: the second step is one worker's alone."""


@dataclass(frozen=True)
class DevicePolicy:
    """What the host may assume of a device. The defaults suit any, and are the best of none. Since interface 1.3."""

    arena: int = 0
    """Alignment in bytes of results within the one block of memory that a running call has for them; 0: each result is a tensor
    of its own. Kernels then see memory of earlier calls, so work on the device must be done in the order of calls."""
    workers: Callable[[], int] | None = None
    """How many threads compute: given to every native kernel (`KernelCode.address`), and part of the keys of plans and of
    measured choices. None: one, and nothing depends on it."""
    splits: Splits = Splits()
    eager: tuple[Any, ...] = ()
    """Where the device's eager is faster than a kernel (`fusewright.toolkit.fuse.eager.Condition`)."""
    flops_per_second: float = 2e11
    bytes_per_second: float = 2e10
    call_seconds: float = 3e-6
    """Round figures for estimates of time; only ratios between ops matter."""
    limit: Callable[[int], int] | None = None
    """Let so many threads at most share what the calling thread computes; returns how many it were. Since interface 1.4."""
    worth_waking: float = 0.0
    """Seconds of an op, by the figures above, from which on more threads gain more than it costs to wake them and to wait for one
    that has no core. A plan whose every op is shorter runs on the calling thread, where there is `limit`. Since interface 1.4."""

    def count_workers(self) -> int:
        """How many threads compute now."""
        return 1 if self.workers is None else self.workers()


@dataclass(frozen=True)
class Unavailable:
    """Why a backend cannot run here, and what would fix it."""

    reason: str
    fix: str = ""


@dataclass(frozen=True)
class Opaque:
    """A compiled region as one callable: tensors of `Region.inputs` in, a tuple in the order of `Region.outputs` out.

    It must not change or alias its inputs. It is one instruction of the plan and keeps that plan out of the disk cache.
    """

    fn: Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Fragment:
    """A compiled region as instructions (see `fusewright.plan.ir`) that the host splices into the flat plan.

    `notes` maps an op id to a few words on how it was lowered; `explain` shows them.
    `kernels` are what its `Launch`es name, by hash: loop kernels (`fusewright.toolkit.ir.Kernel`), or whatever else
    `Backend.load` makes code of, once for all fragments of a graph.
    """

    instructions: tuple[Any, ...]
    notes: Mapping[int, str] = field(default_factory=dict)
    kernels: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelCode:
    """A loaded loop kernel. `call(tensors, sizes, scalars)` runs it: the kernel's buffers in order, outputs allocated
    by the caller.

    `address`, where there is one, is that of a C function `int64 f(int64 *block, int64 workers)`, whose block holds the
    addresses of the buffers, then the sizes, then the scalars (floats as the bits of a double). It returns an error
    code that `error(code, block)` turns into the exception that eager would raise; 0 is success. The function is there for as
    long as somebody holds `call`.

    `kernel` is what the code was made of. Where it has `buffers`, `symbols` and `scalars`, as loop kernels do, launches are held
    to them when a plan comes from the disk. Since interface 1.2.
    """

    call: Callable[..., None]
    address: int | None = None
    error: Callable[[int, Sequence[int]], Exception] | None = None
    kernel: Any = None
    source: Callable[[], str] | None = None
    """The text that the code was compiled from, for people to read. Since interface 1.3."""


Compiled: TypeAlias = Opaque | Fragment


class Recorder(Protocol):
    """Records work on a device and replays it as a whole (a graph of its driver), for plans of fixed shapes."""

    device_type: str

    def stream(self, device: str) -> Hashable | None:
        """What orders work now. Recordings of one stream may share memory. None: nothing can be recorded or
        replayed here and now."""
        ...

    def record(
        self, run: Callable[[], Sequence[torch.Tensor]], warm: bool, shared: bool = True
    ) -> tuple[Sequence[torch.Tensor], Callable[[], None]]:
        """The results of `run`, which every call of the returned function fills anew. `warm`: run it once before.
        `shared`: other recordings of this stream may use its memory when the work that follows a replay is done.

        Raises `RuntimeError` (and leaves nothing behind) when something in it cannot be recorded.
        """
        ...

    def seconds(self, run: Callable[[], Any]) -> float:
        """Device time of a call, by a short measurement."""
        ...


@dataclass
class RuleLog:
    """Which rewrite rules may still be applied to a graph, and how often each was. `disabled` are ids that are switched off,
    `fuel` is how many rewrites there may be in all (None: any number). Since interface 1.3."""

    disabled: Collection[str] = ()
    fuel: int | None = None
    hits: Counter[str] = field(default_factory=Counter)
    spent: int = 0

    def allows(self, id: str) -> bool:
        """Whether a rule may be applied now."""
        return id not in self.disabled and (self.fuel is None or self.spent < self.fuel)

    def hit(self, *ids: str) -> None:
        """Count one rewrite, and the rules that made it."""
        self.hits.update(ids)
        self.spent += 1

    def copy(self) -> RuleLog:
        """As it is now, for an attempt that may be made again."""
        return RuleLog(self.disabled, self.fuel, Counter(self.hits), self.spent)


class CompileContext(Protocol):
    """What the host offers while a region is compiled."""

    @property
    def options(self) -> Mapping[str, Any]: ...

    @property
    def rules(self) -> RuleLog:
        """What a backend's own rewrite rules are held to, and counted in, as the host's are. Since interface 1.3."""
        ...

    @property
    def device(self) -> Device: ...

    def value(self, spec: TensorSpec | None) -> Value:
        """A fresh temporary value for a fragment."""
        ...

    def aten(self, op: OpView) -> Any:
        """The instruction that runs `op` exactly as eager does."""
        ...

    def choose(self, key: str, candidates: Mapping[str, Callable[[], Any]]) -> str:
        """The name of the fastest candidate, by a short measurement that is remembered under `key` across processes."""
        ...

    def provisional(self) -> None:
        """Says that this lowering holds for this process alone: its plan stays out of the cache. Since interface 1.2."""
        ...


@dataclass(frozen=True)
class LayerAccuracy:
    """What quantization does to one layer's result: the ratio of signal to quantization noise in dB, with the whole model
    quantized (`sqnr`), and how many multiplications the layer has. Since interface 1.3."""

    name: str
    op: str
    shape: tuple[int, ...]
    sqnr: float
    work: int


@dataclass(frozen=True)
class QuantizationReport:
    """Layers in the order of the model, layers that stayed in floats with the reason, and the model's own ratio in dB.
    Since interface 1.3."""

    recipe: str
    layers: tuple[LayerAccuracy, ...]
    stayed: Mapping[str, str]
    sqnr: float


class Quantization(Protocol):
    """What `fusewright.quantize` and the command line ask of a backend. Since interface 1.3."""

    recipes: Mapping[str, str]
    """Name of a recipe -> one line on it."""

    def quantize(
        self, model: torch.nn.Module, inputs: Sequence[Any], recipe: str, *, keep: Sequence[str], dynamic_batch: bool
    ) -> torch.nn.Module:
        """The model with quantize and dequantize ops, for `torch.compile` with this backend. Each of `inputs` is a tensor, a tuple
        of arguments or a dict of keyword arguments; `keep` are names of modules (fnmatch) that stay in floats."""
        ...

    def report(self, model: torch.nn.Module, quantized: torch.nn.Module, inputs: Sequence[Any]) -> QuantizationReport:
        """Where quantization costs accuracy."""
        ...

    def kernels(self, op: str, sizes: Sequence[Any]) -> Mapping[str, Callable[[], Any]]:
        """Bare calls of each engine for a quantized product, for benches: "linear" of (m, k, n), "conv" of (input, weight, stride,
        groups)."""
        ...


class Backend(abc.ABC):
    """One vendor's lowering. `name` is the name given to `torch.compile`; see docs/interface.md for a walk-through."""

    name: ClassVar[str]
    device_type: ClassVar[str]
    interface: ClassVar[tuple[int, int]] = INTERFACE
    opset: ClassVar[int] = OPSET
    options: ClassVar[Mapping[str, Any]] = {}
    """Options of this backend beyond the common ones: name -> default. The type of the default is the type of the
    option.
    """
    choices: ClassVar[Mapping[str, Sequence[Any]]] = {}
    """The values that an option of this backend may have, where these are few: name -> values. Since interface 1.4."""
    environment: ClassVar[Mapping[str, str]] = {}
    """Environment variables that this backend reads, `FUSEWRIGHT_...` -> a line of help: `fusewright config` lists them.
    Since interface 1.4."""
    rules: ClassVar[Sequence[str]] = ()
    """Ids that this backend asks `ctx.rules` for, beside those of its `Row`s: the option `disable_rules` takes no others. Since
    interface 1.4."""
    priority: ClassVar[int] = 0
    """Rank for `backend="fusewright"` among the backends that work on a device type. 0: never picked, only used by
    name.
    """

    constant_masks: ClassVar[bool] = False
    """Whether attention masks that are constants are dropped where they keep everything, and become `is_causal` where
    they hide the future, before anything is lowered."""
    channels_last_training: ClassVar[bool] = False
    """Whether images of training steps lie channels-last between convolutions in half precision, before gradients are traced. Since
    interface 1.5."""
    real_views: ClassVar[bool] = False
    """Whether a view op in a region always gives a view of its input's memory. If not, eager makes the views that the
    caller sees."""

    shows_constants: ClassVar[bool] = False
    """Whether ops on weights alone share a region with what reads their results, so that the backend sees what a weight is made
    of. They are prepared all the same. Since interface 1.3."""

    namespaces: ClassVar[Sequence[str]] = ()
    """Namespaces of torch operators that its plans call and the opset has not, such as its own. A plan that calls others,
    which the graph does not call either, is not kept on disk. Since interface 1.2."""

    def __init__(self, device: Device | None = None, options: Mapping[str, Any] | None = None) -> None:
        """`options` are the checked values of this class's own options."""
        self.device = device
        self.values: Mapping[str, Any] = {**type(self).options, **(options or {})}

    @classmethod
    @abc.abstractmethod
    def probe(cls) -> Device | Unavailable:
        """What this backend would run on here. Total and cheap; vendor libraries are imported here, not at import."""

    @classmethod
    def simulated(cls, options: Mapping[str, Any]) -> Device | Unavailable:
        """What `options={"simulate": True}` runs on: this backend's own code on the host's tensors, without its hardware.

        `options` are the checked values of the class's own. Raises `OptionError` for ones that name no device.
        """
        return Unavailable(f"{cls.name} has no simulated device")

    @classmethod
    def lowers(cls) -> Sequence[str] | None:
        """Row names of the opset that this backend has a lowering for, for reports; None when it cannot say."""
        return () if cls.supports is Backend.supports else None

    @classmethod
    def quantization(cls) -> Quantization | None:
        """How models are quantized for this backend; None: they are not. Since interface 1.3."""
        return None

    @classmethod
    def remark(cls) -> str:
        """What `doctor` tells beside the device: which parts are there, what is missing. Since interface 1.3."""
        return ""

    def policy(self) -> DevicePolicy:
        """What the host may assume of the device. Since interface 1.3."""
        return DevicePolicy()

    def prepare(self) -> None:  # noqa: B027 (by default there is nothing to start)
        """A graph for this device is about to be traced: the time to start what takes long and runs beside that, such as
        processes of a compiler. Whether anything will have to be compiled is not known yet. Since interface 1.1.
        """

    def supports(self, op: OpView) -> Verdict:
        """Whether this backend claims `op`. Pure, metadata only; anything but yes carries a reason."""
        return Verdict(Why.NO_LOWERING)

    def compile(self, region: Region, ctx: CompileContext) -> Compiled:
        """Lower a claimed region. Raises `Decline` to give it back; any other exception counts as a bug of the backend."""
        raise Decline("this backend compiles nothing", Why.NO_LOWERING)

    def profitable(self, region: Region) -> Verdict:
        """Whether the region is worth taking from eager."""
        return YES

    def group(self, graph: GraphView, claimed: frozenset[int]) -> Sequence[frozenset[int]] | None:
        """Regions as sets of op ids, or None for the host's own maximal convex ones. The host checks convexity."""
        return None

    def load(self, kernels: Mapping[str, Any]) -> Mapping[str, KernelCode]:
        """Code for the loop kernels of all fragments of a graph, by structural hash."""
        raise NotImplementedError(f"{self.name} makes no loop kernels")

    def recorder(self) -> Recorder | None:
        """How whole plans are recorded and replayed on this device; None: they are not."""
        return None

    def store(self, kernels: Sequence[str]) -> bytes | None:
        """The loaded code of these kernels as bytes for the disk cache; None keeps plans that use them out of it."""
        return None

    def restore(self, data: bytes, kernels: Sequence[str]) -> Mapping[str, KernelCode]:
        """Code from what `store` gave, in another process of the same fingerprint. Raises `ValueError` when it does not
        fit.
        """
        raise ValueError(f"{self.name} stores no code")

    def fingerprint(self) -> str:
        """What compiled code depends on beside the graph; part of every cache key. Equal in every process."""
        versions = f"{self.name}-{self.interface[0]}.{self.interface[1]}-{self.opset}"
        d = self.device
        if d is None:
            return versions
        features = ",".join(sorted(d.features))  # the order of a set differs from process to process
        return f"{versions}-{d.type}-{d.arch}-{d.driver}{' simulated' * d.simulated}-{features}"

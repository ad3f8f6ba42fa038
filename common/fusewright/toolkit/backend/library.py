"""A backend's table of library calls. One registration declares which ops are claimed and the code that lowers them.

    LOWERINGS: LoweringTable[OpLowering] = LoweringTable()

    @LOWERINGS.add("relu", dtypes={torch.float32})
    def relu(op: OpView, ctx: CompileContext) -> Instruction:
        return Call("vendor::relu.default", (ref(op.arg("self")),), (op.out.id,), op_id=op.id)

`LOWERINGS.supports(op, device)` implements `Backend.supports`, `lower(LOWERINGS, region, ctx)` implements
`Backend.compile`. The backend chooses the type of the code; the table only stores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from fusewright.interface import (
    HOST,
    YES,
    CompileContext,
    Device,
    Fragment,
    OpView,
    Region,
    TensorSpec,
    Value,
    Verdict,
    Why,
)
from fusewright.plan.ir import Instruction, Ref
from fusewright.toolkit.rules.space import layout_of

Code = TypeVar("Code", bound=Callable[..., Any])

OpLowering: TypeAlias = Callable[[OpView, CompileContext], Instruction | Iterable[Instruction]]
"""The usual type of a lowering's code: takes an op, returns the instructions that compute `op.outs`."""

Condition: TypeAlias = Callable[[OpView], str | None]
"""Returns None if the lowering takes the op, else a short reason."""


@dataclass(frozen=True)
class Lowering(Generic[Code]):
    """One row of the table. `dtypes` maps each accepted dtype to the device feature that it needs ("" for none); None
    accepts all.

    `layouts` lists the layouts allowed for tensor arguments (see `layout_of`); None accepts any strides.
    """

    op: str
    code: Code
    dtypes: Mapping[torch.dtype, str] | None
    layouts: frozenset[str] | None
    dynamic: bool
    features: frozenset[str]
    when: Condition | None

    def verdict(self, op: OpView, device: Device) -> Verdict:
        """Whether this row takes `op` on `device`; if not, the first reason why."""
        specs = [v.spec for v in (*op.inputs(), *op.outs) if v.spec is not None]
        against = (
            _wrong_device(specs, device),
            self._dynamic(op),
            self._dtype(specs, device),
            self._layout(specs),
            self._features(device),
        )
        reason = next((v for v in against if v is not None), None)
        return reason if reason is not None else self._condition(op)  # a condition may rely on the other checks

    def _dynamic(self, op: OpView) -> Verdict | None:
        if self.dynamic:
            return None
        for v in (*op.inputs(), *op.outs):
            if v.dim is not None or (v.spec is not None and not v.spec.static):
                return Verdict(Why.DYNAMIC_SHAPE, f"the lowering of {op.op} needs static shapes; {_shape(v)} is not")
        return None

    def _dtype(self, specs: Iterable[TensorSpec], device: Device) -> Verdict | None:
        if self.dtypes is None:
            return None
        for dtype in compute_dtypes(specs):
            if dtype not in self.dtypes:
                return Verdict(Why.DTYPE, f"{_name(dtype)} is not among {', '.join(map(_name, self.dtypes))}")
            feature = self.dtypes[dtype]
            if feature and feature not in device.features:
                return Verdict(Why.DEVICE_FEATURE, f"{_name(dtype)} needs {feature}, which {device.arch} has not")
        return None

    def _layout(self, specs: Iterable[TensorSpec]) -> Verdict | None:
        if self.layouts is None:
            return None
        for spec in specs:
            layout = layout_of(spec)
            if layout not in self.layouts:
                return Verdict(Why.LAYOUT, f"{layout} is not among {', '.join(sorted(self.layouts))}")
        return None

    def _features(self, device: Device) -> Verdict | None:
        missing = self.features - device.features
        return Verdict(Why.DEVICE_FEATURE, f"needs {', '.join(sorted(missing))}") if missing else None

    def _condition(self, op: OpView) -> Verdict:
        reason = self.when(op) if self.when else None
        return Verdict(Why.ATTR, reason) if reason else YES


class LoweringTable(Generic[Code]):
    """Lowerings by row name of the opset. Several rows for one op are tried in the order of registration."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Lowering[Code]]] = {}

    def add(
        self,
        *names: str,
        dtypes: Iterable[torch.dtype] | Mapping[torch.dtype, str] | None = None,
        layouts: Iterable[str] | None = None,
        dynamic: bool = False,
        features: Iterable[str] = (),
        when: Condition | None = None,
    ) -> Callable[[Code], Code]:
        """Register the decorated function for the ops `names`. Symbolic shapes are rejected unless `dynamic`."""
        if dtypes is not None and not isinstance(dtypes, Mapping):
            dtypes = dict.fromkeys(dtypes, "")
        accepted = None if layouts is None else frozenset(layouts)

        def register(code: Code) -> Code:
            for name in names:
                row = Lowering(name, code, dtypes, accepted, dynamic, frozenset(features), when)
                self._rows.setdefault(name, []).append(row)
            return code

        return register

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __contains__(self, name: object) -> bool:
        return name in self._rows

    def find(self, op: OpView, device: Device) -> Lowering[Code] | Verdict:
        """Return the row that takes `op`, or why none does."""
        verdict = Verdict(Why.NO_LOWERING, f"no lowering for {op.op}")
        for row in self._rows.get(op.op, ()):
            verdict = row.verdict(op, device)
            if verdict:
                return row
        return verdict

    def supports(self, op: OpView, device: Device) -> Verdict:
        """The answer for `Backend.supports`."""
        found = self.find(op, device)
        return found if isinstance(found, Verdict) else YES


def lower(table: LoweringTable[OpLowering], region: Region, ctx: CompileContext) -> Fragment:
    """Lower a region op by op, each through its row: the `compile` of a backend without fusion."""
    instructions: list[Instruction] = []
    for op in region.ops:
        row = table.find(op, ctx.device)
        if isinstance(row, Verdict):
            raise ValueError(f"{op.op} is in the region, but the table says {row}")
        made = row.code(op, ctx)
        instructions.extend(made if isinstance(made, Iterable) else (made,))
    return Fragment(tuple(instructions))


def ref(arg: Any) -> Any:
    """Convert an argument of an `OpView` to an argument of an instruction: values become `Ref`s."""
    if isinstance(arg, Value):
        return Ref(arg.id)
    if isinstance(arg, tuple):
        return tuple(ref(a) for a in arg)
    return arg


def compute_dtypes(specs: Iterable[TensorSpec]) -> list[torch.dtype]:
    """The dtypes that an op computes in: its floating-point ones (indices and masks do not count), or all if it has none."""
    found = dict.fromkeys(s.dtype for s in specs)
    floating = [d for d in found if d.is_floating_point or d.is_complex]
    return floating or list(found)


def elsewhere(spec: TensorSpec, device: Device) -> str | None:
    """Why a backend on `device` cannot access a tensor, or None. Simulated devices compute on host tensors."""
    runs_on = HOST if device.simulated else device.type
    if spec.device.partition(":")[0] == runs_on:
        return None
    return f"a tensor is on {spec.device}, the backend runs on {runs_on}"


def _wrong_device(specs: Iterable[TensorSpec], device: Device) -> Verdict | None:
    for spec in specs:
        if why := elsewhere(spec, device):
            return Verdict(Why.DEVICE, why)
    return None


def _shape(v: Value) -> str:
    if v.spec is None:
        return str(v.dim)
    return f"[{', '.join(map(str, v.spec.shape))}]"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

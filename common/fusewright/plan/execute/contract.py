"""Check a backend's fragment against the interface's contract by running it: `options={"check": "contract"}`.

The first run of a fragment checks what `verify` cannot see from instructions alone: shapes, dtypes, strides, shared memory,
modified inputs, and values, against eager and fp64. The fragment runs as one instruction of the plan, so a violation is found
before anything else has read its results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fusewright import accuracy, ops
from fusewright.errors import BackendContractError
from fusewright.interface import HOST, Backend, Dim, Fragment, OpView, Region, TensorSpec, Value
from fusewright.ops import oracle
from fusewright.ops.core import unbind
from fusewright.plan.build import Plan, call_of, operator_of
from fusewright.plan.execute import codegen
from fusewright.plan.execute.firstrun import MetadataMismatch
from fusewright.plan.execute.opaque import address, mismatch
from fusewright.plan.ir import Call, CallPython, Ref, Run

PRECISION = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def checked(
    backend: Backend, region: Region, fragment: Fragment, temporaries: Mapping[int, TensorSpec], inputs: Sequence[Value]
) -> Fragment:
    """Wrap `fragment` as one opaque instruction that checks itself at its first run. `inputs` are the graph's, which bind
    symbolic sizes."""
    given = list({v.id: v for v in (*region.inputs, *(v for v in inputs if _binds(v)))}.values())
    plan = _plan_of(region, fragment, temporaries, given)
    plan.policy = backend.policy()
    run = codegen.load(plan, backend.load(plan.kernels) if plan.kernels else {})
    fn = _Checked(backend.name, region, run)
    args, outs = tuple(Ref(v.id) for v in given), tuple(v.id for v in region.outputs)
    ids = tuple(op.id for op in region.ops)
    return Fragment((CallPython(fn, args, outs, region.name, ids),), fragment.notes)


def _binds(v: Value) -> bool:
    """Whether a symbolic size can be read from an input of the graph."""
    return v.dim is not None or (v.spec is not None and any(isinstance(s, Dim) for s in v.spec.shape))


def _plan_of(
    region: Region, fragment: Fragment, temporaries: Mapping[int, TensorSpec], given: Sequence[Value]
) -> Plan:
    values = [*given, *(v for op in region.ops for v in op.outs)]
    return Plan(
        inputs=tuple(v.id for v in given),
        outputs=tuple(Ref(v.id) for v in region.outputs),
        instructions=list(fragment.instructions),
        prepare=[],
        prepare_inputs=(),
        prepare_outputs=(),
        specs={**temporaries, **{v.id: v.spec for v in values if v.spec is not None}},
        scalars={v.id: v.dim.expr.name for v in given if v.dim is not None and v.dim.expr.name},
        kernels=dict(fragment.kernels),
    )


class _Checked:
    """A fragment as a callable of its region's inputs. The first call is compared with eager."""

    def __init__(self, backend: str, region: Region, run: Run) -> None:
        self.backend, self.region, self.run = backend, region, run
        self.makers = {v.id: op for op in region.ops for v in op.outs}
        self.passed = False

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self.run(list(args)) if self.passed else self._first(args)

    def _first(self, args: Sequence[Any]) -> Sequence[Any]:
        given = args[: len(self.region.inputs)]
        eager = _in_eager(self.region, given)
        for v in self.region.outputs:  # a fragment that matches a wrong trace is not to blame
            if v.spec is not None and (reason := mismatch(eager[v.id], v.spec)):
                raise MetadataMismatch(v.id, eager[v.id], reason)
        tensors = [a for a in given if isinstance(a, torch.Tensor)]
        before = [t.detach().clone() for t in tensors]
        results = self.run(list(args))
        if not all(map(_same_bits, tensors, before)):
            self._complain("it changed one of its inputs in place")
        self._check_metadata(results)
        self._check_memory(results, eager, tensors)
        self._check_values(results, eager, given)
        self.passed = True
        return results

    def _complain(self, what: str, result: int | None = None) -> None:
        where = ""
        if result is not None:
            op = self.makers[self.region.outputs[result].id]
            where = f"result {result}, {op.op}{f' at {op.source}' if op.source else ''}, "
        raise BackendContractError(
            f"backend {self.backend!r}, {self.region.name} ({self.region.op_names}): {where}{what}. "
            "This is a bug of the backend."
        )

    def _check_metadata(self, results: Sequence[Any]) -> None:
        for k, (result, v) in enumerate(zip(results, self.region.outputs, strict=True)):
            if v.spec is not None and (reason := mismatch(result, v.spec)):
                self._complain(reason, k)

    def _check_memory(
        self, results: Sequence[Any], eager: Mapping[int, Any], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Results may share memory with inputs and each other only where eager's do."""
        shared = {address(t) for t in tensors} - {0}
        ids = [v.id for v in self.region.outputs]
        for k, result in enumerate(results):
            if address(result) in shared and address(eager[ids[k]]) != address(result):
                self._complain("shares memory with an input", k)
            for j in range(k):
                mine, theirs = address(result), address(eager[ids[k]])
                if mine and mine == address(results[j]) and theirs != address(eager[ids[j]]):
                    self._complain(f"shares memory with result {j}", k)

    def _check_values(self, results: Sequence[Any], eager: Mapping[int, Any], given: Sequence[Any]) -> None:
        """Compare values by the fp64 rule (`fusewright.accuracy`); integers and bools must be equal."""
        wide = _in_fp64(self.region, given)
        for k, (result, v) in enumerate(zip(results, self.region.outputs, strict=True)):
            if not isinstance(result, torch.Tensor) or "empty" in self.makers[v.id].op:
                continue
            exact, wanted, got = (torch.view_as_real(t) if t.is_complex() else t for t in (wide[v.id], eager[v.id], result))
            found = accuracy.compare([exact], [wanted], [got], PRECISION.get(got.dtype, "fp32"))
            if not found.passed:
                self._complain(f"is wrong: {found.reason.removeprefix('output 0: ')}", k)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, counting NaN as equal to itself."""
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _in_eager(region: Region, given: Sequence[Any]) -> dict[int, Any]:
    """Compute every value of a region in eager."""
    env: dict[int, Any] = {v.id: t for v, t in zip(region.inputs, given, strict=True)}
    for op in region.ops:
        env.update(zip((v.id for v in op.outs), called(op, env), strict=True))
    return env


def called(op: OpView, env: Mapping[int, Any]) -> tuple[Any, ...]:
    """Compute every result of an op by eager's own operator."""
    call: Call = call_of(op)
    operator = operator_of(call.target)
    assert operator is not None, f"{op.target} is no operator"
    return oracle.flat(operator(*_read(call.args, env), **{k: _read(v, env) for k, v in call.kwargs}))


def _in_fp64(region: Region, given: Sequence[Any]) -> dict[int, Any]:
    """Compute every value of a region by the opset's reference semantics, with floats in fp64."""
    env: dict[int, Any] = {v.id: oracle.widen(t) for v, t in zip(region.inputs, given, strict=True)}
    for op in region.ops:
        env.update(zip((v.id for v in op.outs), evaluated(op, env), strict=False))
    return env


def evaluated(op: OpView, env: Mapping[int, Any]) -> tuple[Any, ...]:
    row = ops.OPS.get(op.op)
    if row is None:
        return called(op, env)
    bound = {name: _read_view(a, env) for name, a in zip(op.argnames, op.args, strict=True)}
    with torch.device(next((v.spec.device for v in op.outs if v.spec is not None), HOST)):  # for references that create tensors
        return oracle.evaluate(row, *unbind(row.params, bound))


def _read(a: Any, env: Mapping[int, Any]) -> Any:
    if isinstance(a, Ref):
        return env[a.id]
    return [_read(x, env) for x in a] if isinstance(a, tuple | list) else a


def _read_view(a: Any, env: Mapping[int, Any]) -> Any:
    if isinstance(a, Value):
        return env[a.id]
    return [_read_view(x, env) for x in a] if isinstance(a, tuple) else a

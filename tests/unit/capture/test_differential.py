"""Compares the direct capture with AOTAutograd's on torch's OpInfo database, on models, and on random programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch.testing._internal.common_methods_invocations import op_db

from fusewright import _torch_compat as compat
from fusewright.bench import models
from fusewright.capture import direct
from tests.capture_modes import side_by_side
from tests.compare import against_eager
from tests.programs import Program, programs

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

NOT_COMPARED = {
    **dict.fromkeys(("jiterator_unary", "jiterator_binary", "jiterator_4inputs_with_extra_args"), "needs a GPU"),
    "jiterator_binary_return_by_ref": "needs a GPU",
    "jiterator_2inputs_2outputs": "needs a GPU",
    **dict.fromkeys(("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), "unwritten"),
    "chalf": "torch compares no such numbers",
}

ENTRIES = {f"{o.name}.{o.variant_test_name}".rstrip("."): o for o in op_db if o.name not in NOT_COMPARED}

DTYPES = (torch.float32, torch.complex64, torch.int64)

EVERY = bool(os.environ.get("FUSEWRIGHT_EVERY_SAMPLE"))
"""Whether all entries run with two samples of all dtypes, instead of one sample of one of them in turn: six times the work."""

SAMPLE = [n for n, o in ENTRIES.items() if torch.float32 in o.dtypes][::40]


def both_modes(name: str, samples: int, dtype: torch.dtype = torch.float32) -> list[str]:
    """List the direct capture's errors on the first samples of a database entry."""
    entry, found = ENTRIES[name], []
    inputs = entry.sample_inputs("cpu", dtype, requires_grad=False) if dtype in entry.dtypes else ()
    for _, sample in zip(range(samples), inputs, strict=False):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        with torch.no_grad(), side_by_side(lambda *a: entry(*a, **kwargs)) as (compiled, modes):  # noqa: B023
            try:
                compiled(*args)
            except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError) as e:
                found += [f"{type(e).__name__}: {e}"] if "direct" in modes.taken and not _aot_fails(entry, sample) else []
        found += modes.problems
    return found


def _aot_fails(entry: Any, sample: Any) -> bool:
    torch.compiler.reset()
    try:
        torch.compile(lambda *a: entry(*a, **sample.kwargs), backend="aot_eager")(sample.input, *sample.args)
    except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
        return True
    return False


@pytest.mark.skipif(not compat.has_python_form(torch.ops.aten.one_hot.default), reason="this torch checks nothing there")
def test_a_lost_assertion_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "CHECKED_IN_PYTHON", frozenset())
    with torch.no_grad(), side_by_side(lambda i: torch.nn.functional.one_hot(i, 3)) as (compiled, modes):
        compiled(torch.tensor([0, 2]))
    assert modes.problems == ["the direct graph has 0 assertions, AOTAutograd's has 2"]


def test_a_wrong_value_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_behind_a_view(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.unsqueeze(0).mul_(3)
        return y

    monkeypatch.setattr(direct._Recorder, "_check_private", lambda self, func, written: None)
    with torch.no_grad(), side_by_side(write_behind_a_view) as (compiled, modes):
        compiled(torch.ones(3))
    assert [p for p in modes.problems if p.startswith("direct: value 0 differs")]


@pytest.mark.parametrize("name", SAMPLE)
def test_entries_of_opinfo(name: str) -> None:
    assert both_modes(name, samples=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(16))
def test_every_entry_of_opinfo(shard: int) -> None:
    taken = {n: [d for d in DTYPES if d in o.dtypes] for n, o in ENTRIES.items()}
    cases = [(n, d) for k, (n, of) in enumerate(taken.items()) for d in (of if EVERY else of[k % max(len(of), 1) :][:1])]
    found = {case: problems for case in cases[shard::16] if (problems := both_modes(case[0], 1 + EVERY, case[1]))}
    assert found == {}


@pytest.mark.parametrize(
    "name", [n if n == "bert" else pytest.param(n, marks=pytest.mark.slow) for n in models.MODELS]
)
def test_models(name: str) -> None:
    pytest.importorskip("transformers", reason="needs fusewright[bench]")
    model, inputs, _ = models.instantiate(models.MODELS[name], "small", seed=0)
    with torch.no_grad(), side_by_side(model) as (compiled, modes):
        compiled(**inputs)
    assert modes.problems == [] and modes.taken == ["direct"]


@given(programs())
@settings(max_examples=8)
def test_random_programs(program: Program) -> None:
    with torch.no_grad(), side_by_side(program, fullgraph=True) as (compiled, modes):
        compiled(*program.inputs())
    assert modes.problems == []


@pytest.mark.slow
@given(programs(steps=12))
@settings(max_examples=30)
def test_long_random_programs(program: Program) -> None:
    with torch.no_grad():
        with side_by_side(program, fullgraph=True) as (compiled, modes):
            compiled(*program.inputs())
        assert modes.problems == []
        for backend in ("fusewright_null", "x86_onednn"):
            assert against_eager(program, program.inputs, backend, exact=False, fullgraph=True) == []


def _in_place(x: torch.Tensor) -> torch.Tensor:
    t = torch.tensor([1.0, 2.0])
    t.add_(1).mul_(x)
    return t


LITERALS: dict[str, Any] = {
    "a scalar": lambda x: x / torch.sqrt(torch.tensor(64, dtype=torch.float)),
    "a list": lambda x: torch.tensor([[1, 2]]).to(x.dtype) + x,
    "an index": lambda x: x[torch.tensor([1, 0, 1])],
    "returned": lambda x: (torch.tensor(5), torch.as_tensor([1.5, 2]), torch.tensor([]), x + 1),
    "on a device": lambda x: torch.tensor(1.5, device=x.device) * x.new_tensor([3.0, torch.nan]) + x,
    "selected": lambda x: torch.where(x > torch.tensor(0.5), torch.tensor(float("nan")), x),
    "written in place": _in_place,
}


@torch.no_grad()
@pytest.mark.parametrize("name", LITERALS)
def test_tensors_of_literals_take_the_direct_road(name: str) -> None:
    with side_by_side(LITERALS[name]) as (compiled, modes):
        for _ in range(2):
            compiled(torch.tensor([0.25, 4.0]))
    assert modes.taken == ["direct"] and not modes.problems


@torch.no_grad()
def test_a_literal_is_known_to_be_one() -> None:
    """So that it becomes a number of the ops that read it, as in a graph that AOTAutograd captured."""
    found: list[torch.fx.GraphModule] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        found.append(direct.capture(gm, example_inputs)[0])
        return gm.forward

    torch.compile(LITERALS["a scalar"], backend=backend)(torch.ones(2))
    (held,) = found[0].graph.find_nodes(op="get_attr")
    assert compat.is_literal(held)


@torch.no_grad()
def test_each_literal_has_its_own_plan_and_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    for value in (2.0, 3.0):
        torch.compiler.reset()
        fast = torch.compile(lambda x, v=value: (torch.tensor([v, v]) * x, torch.tensor([v])), backend="x86_onednn")
        for _ in range(3):
            product, held = fast(torch.ones(2))
            assert product.tolist() == [value, value] and held.item() == value
            held.zero_()


def _index(x: torch.Tensor) -> torch.Tensor:
    """Relative positions, as BEiT builds them."""
    grid = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
    coords = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0).contiguous()
    coords[:, :, 0] += 2
    coords[:, :, 1] += 2
    coords[:, :, 0] *= 5
    index = torch.zeros(size=(10, 10), dtype=coords.dtype)
    index[1:, 1:] = coords.sum(-1)
    index[0, 0:] = 25
    index[0:, 0] = 26
    return x[index.view(-1)]


def _part_read_again(x: torch.Tensor) -> torch.Tensor:
    t = x * 2
    row = t[1]
    row.add_(1)
    row.mul_(3)
    return torch.stack([t.sum(0), row])


def _converted(x: torch.Tensor) -> torch.Tensor:
    t = torch.zeros(4, 3, dtype=torch.float64)
    t[1:3] = x[0, :3]
    return t


def _other_view(x: torch.Tensor) -> torch.Tensor:
    t = x * 2
    row, column = t[1], t[:, 0]
    row.add_(1)
    return column + 1


PARTS: dict[str, Any] = {"an index": _index, "read again": _part_read_again, "converted": _converted, "another view": _other_view}


def _other_kind(x: torch.Tensor) -> torch.Tensor:
    t = x * 2
    row, turned = t[1], t.t()
    row.add_(1)
    return turned + 1


def _of_an_input(x: torch.Tensor) -> torch.Tensor:
    x[0] += 1
    return x * 2


def _behind_a_transpose(x: torch.Tensor) -> torch.Tensor:
    t = x * 2
    t.t()[0].add_(1)
    return t


DOUBTFUL: dict[str, Any] = {"another kind of view": _other_kind, "an input": _of_an_input, "a transpose": _behind_a_transpose}


@torch.no_grad()
@pytest.mark.parametrize("name", [*PARTS, *DOUBTFUL])
def test_writes_into_parts_of_a_tensor_that_the_graph_made(name: str) -> None:
    """They take the direct road, unless a view of another kind is read later, or somebody else may see the write."""
    program = {**PARTS, **DOUBTFUL}[name]
    given = torch.arange(30 * 4.0).reshape(30, 4)
    with side_by_side(program) as (compiled, modes):
        for _ in range(2):
            assert torch.equal(compiled(given.clone()), program(given.clone()))
    assert modes.problems == []
    assert all((mode == "direct") is (name in PARTS) for mode in modes.taken) and modes.taken

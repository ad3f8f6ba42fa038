"""Symbolic sizes: few compilations, right results at every length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from fusewright import report
from fusewright.plan import vocabulary
from fusewright.stages import rounds

BACKEND = "x86_onednn"

pytestmark = [pytest.mark.hardware(BACKEND), pytest.mark.usefixtures("fresh_dynamo")]


def bert_inputs(length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(5, 90, (1, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def close(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether our error against fp64 is at most twice eager's plus a floor of a few rounding steps."""
    error, allowed = (ours.double() - exact).abs().max(), (eager.double() - exact).abs().max()
    return bool(error <= 2 * allowed + 4 * torch.finfo(eager.dtype).eps * exact.abs().max())


def bert() -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="needs fusewright[bench]")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=96,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=256,
    )
    return transformers.BertModel(config).eval()


@torch.no_grad()
def test_bert_at_four_lengths_compiles_at_most_twice() -> None:
    module, exact = bert(), bert().double()
    with report.recording() as reports:
        twin = torch.compile(module, backend=BACKEND, dynamic=True)
        for length in (32, 57, 128, 200):
            inputs = bert_inputs(length)
            ours, eager, right = twin(**inputs)[0], module(**inputs)[0], exact(**inputs)[0]
            assert ours.shape == eager.shape and ours.stride() == eager.stride()
            assert close(ours, eager, right), f"length {length}"
    assert len(reports) <= 2


@torch.no_grad()
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 16, 17])
def test_one_compiled_function_at_many_sizes(size: int) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    twin = torch.compile(net, backend=BACKEND, dynamic=True)
    for n in (5, size, 11):
        x = torch.randn(n, 8)
        torch.testing.assert_close(twin(x), net(x))


@torch.no_grad()
def test_mark_dynamic() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    with report.recording() as reports:
        twin = torch.compile(net, backend=BACKEND)
        for n in (4, 6, 9):
            x = torch.randn(n, 8)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(twin(x), net(x))
    assert len(reports) == 1


def cut_and_joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (torch.cat([x[:, 2:], y[:, :-1]], 1) + 1).exp() * 2


def test_sizes_that_a_slice_or_a_join_makes_are_fused() -> None:
    """Traced strides of such results are Max(1, s0 - 2), which equals s0 - 2 unless the tensor is empty."""
    compiled = torch.compile(cut_and_joined, backend=BACKEND, dynamic=True)
    with report.recording() as graphs:
        for n in (5, 8, 3):
            x, y = torch.randn(n, n + 1), torch.randn(n, n)
            torch.testing.assert_close(compiled(x, y), cut_and_joined(x, y))
            assert compiled(x, y).stride() == cut_and_joined(x, y).stride()
    assert len(graphs) == 1
    assert not graphs[0].fallbacks


def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.interpolate(x.exp(), scale_factor=1.7, mode="nearest") + 1


def test_sizes_by_torchs_own_functions() -> None:
    """The size of the result is traced as TruncToInt(1.7 * s0)."""
    compiled = torch.compile(doubled, backend=BACKEND, dynamic=True)
    for n in (5, 8, 11):
        x = torch.randn(2, 3, n)
        torch.testing.assert_close(compiled(x), doubled(x))


PIECES = {
    "chunk": lambda x: [p * 2 for p in x.chunk(2)],
    "chunk of products": lambda x: (x @ x.t()).chunk(3, 1)[2].relu(),
    "split": lambda x: [p.exp() for p in x.split(4)],
    "tensor_split": lambda x: x.tensor_split(3)[1] * 2,
    "unbind": lambda x: x.unbind(1)[0] + 1,
}


@torch.no_grad()
@pytest.mark.parametrize("name", PIECES)
def test_pieces_along_a_symbolic_dimension_compile_as_often_as_under_aot_eager(name: str) -> None:
    """Torch specializes on the number of pieces; our passes must not specialize further."""
    fn, compiles = PIECES[name], []
    for backend in ("aot_eager", BACKEND):
        torch.compiler.reset()
        counter = CompileCounterWithBackend(backend)
        compiled = torch.compile(fn, backend=counter, dynamic=True)
        for n in (13, 14, 15, 16):
            x = torch.randn(n, 6)
            torch.testing.assert_close(compiled(x), fn(x))
        compiles.append(counter.frame_count)
    assert compiles[0] == compiles[1] < 4


@torch.no_grad()
@pytest.mark.faulty
def test_a_stage_that_assumes_a_size_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(c: rounds.Compilation) -> None:
        for node in c.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta["val"], torch.Tensor):
                int(node.meta["val"].shape[0])

    monkeypatch.setattr(rounds, "STAGES", (*rounds.STAGES, ("greedy", greedy)))
    x = torch.randn(13, 6)
    with report.recording() as graphs:
        torch.compile(torch.sin, backend=BACKEND, dynamic=True)(x)
    assert [b for b in graphs[0].bugs if b.startswith("greedy assumed of the sizes: ")]
    torch.compiler.reset()
    with pytest.raises(Exception, match="greedy assumed of the sizes"):
        torch.compile(torch.sin, backend=BACKEND, dynamic=True, options={"strict": True})(x)


@torch.no_grad()
@pytest.mark.parametrize("bounds", [(-40, None), (-40, -3), (None, 40), (-40, -9)])
def test_a_slice_that_reaches_beyond_a_symbolic_size_is_clipped(bounds: tuple[int | None, int | None]) -> None:
    """A sliding-window cache keeps its last entries, and at first asks for more than there are."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], 1)[:, slice(*bounds)] * 2

    with report.recording() as reports:
        twin = torch.compile(fn, backend=BACKEND, dynamic=True)
        for length in (4, 7, 30, 33):
            x = torch.randn(2, length, 3)
            assert torch.equal(twin(x), fn(x))
    assert [b for r in reports for b in r.bugs] == []


@torch.no_grad()
def test_a_size_whose_formula_is_too_long_for_a_plan_is_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    def grown(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.cat([x, x[: x.shape[0] // 3]]) * 1.5 + 1
        return x

    monkeypatch.setattr(vocabulary, "_LONGEST", 30)  # 2000 characters take eight rounds, and a while
    with report.recording() as reports:
        twin = torch.compile(grown, backend=BACKEND, dynamic=True, options={"fallback": "allow", "strict": True})
        for length in (11, 17):
            x = torch.randn(length)
            torch.testing.assert_close(twin(x), grown(x))
    (found,) = reports
    assert {r.verdict.detail for r in found.fallbacks} == {"the formula of a size is too long"}
    assert found.count("lowered") and not found.bugs


def test_a_divisor_that_guessed_sizes_make_zero() -> None:
    """Where a region shows no tensor with a symbol as its size, the symbol is guessed, and a quotient of it may be zero."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(2 * (x.shape[1] // 100), -1)
        wide = torch.cat([rows, rows], 1).exp()
        return wide.softmax(-1) * 2 + wide

    x = torch.randn(4, 300)
    torch.testing.assert_close(torch.compile(fn, backend=BACKEND, dynamic=True, options={"strict": True})(x), fn(x))


def test_a_product_whose_summed_size_is_symbolic() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tensordot(x, y, dims=([-1], [1])) * 0.1

    compiled = torch.compile(fn, backend=BACKEND, dynamic=True, options={"strict": True})
    for rows, size in ((5, 8), (4, 7), (9, 16)):
        x, y = torch.randn(3, size, rows).mT, torch.randn(3, size)
        torch.testing.assert_close(compiled(x, y), fn(x, y))


@pytest.mark.parametrize(
    "windows",
    [
        lambda x: F.unfold(x, 3, padding=1, stride=2),
        lambda x: F.fold(x.flatten(2).repeat(1, 9, 1), (10, 10), 3, stride=2),
        lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
        lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    ],
    ids=["unfold", "fold", "avg_pool2d", "max_pool2d"],
)
def test_windows_of_any_number_of_images_are_kernels_in_training(windows: Callable[[torch.Tensor], torch.Tensor]) -> None:
    twin = torch.compile(lambda x: windows(x.sin()).square().sum(), backend=BACKEND, options={"fallback": "error"})
    with report.recording() as reports:
        for n in (2, 5):
            x = torch.randn(n, 3, 4, 4, requires_grad=True)
            same = x.detach().clone().requires_grad_()
            torch._dynamo.mark_dynamic(x, 0)
            twin(x).backward()
            windows(same.sin()).square().sum().backward()
            torch.testing.assert_close(x.grad, same.grad)
    assert len(reports) == 2  # forward and backward

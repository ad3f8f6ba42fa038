"""A sample of the zoo, and tests that its judge finds errors. `python -m tests.zoo` runs all of it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from tests.zoo import __main__ as command
from tests.zoo import catalog, geometry
from tests.zoo import check as judge
from tests.zoo.check import check
from tests.zoo.page import PAGE, newest, page, records

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

SAMPLE = [
    ("transformers/albert", "inference"),
    ("transformers/deberta-v2", "inference"),
    ("transformers/mamba", "bf16"),
    ("transformers/mistral", "generate"),  # a sliding-window cache
    ("transformers/qwen2_moe", "inference"),
    ("handmade/unet", "training"),
    ("handmade/graph_attention", "training"),
    ("handmade/state_space", "dynamic"),
    ("handmade/vocoder", "bf16"),
    ("transformers/albert", "calls"),
    ("handmade/unet", "steps"),
]


@pytest.mark.parametrize(("model", "mode"), SAMPLE)
def test_a_sample_is_right(model: str, mode: str) -> None:
    found = check(model, mode, "x86_onednn")
    assert (found.status, found.bugs) == ("right", []), found.reason


def test_every_source_has_models() -> None:
    names = catalog.names()
    assert sum(n.startswith("transformers/") for n in names) > 400
    assert {n.partition("/")[0] for n in names} >= {"transformers", "handmade"}


def backend_that(change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Make a backend that runs the graph and then changes its first result."""

    def backend(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            first, *rest = graph(*args)
            return (change(first), *rest)

        return run

    return backend


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        (lambda t: t * (1 + 1e-4), "wrong", "error"),
        (lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "wrong", "strides"),
        (lambda t: t.double(), "wrong", "float64"),
        (lambda t: t.nosuch, "crashed", "nosuch"),
    ],
)
def test_the_judge_finds_what_is_wrong(change: Callable[[Tensor], Tensor], status: str, word: str) -> None:
    found = check("handmade/diffusion_block", "inference", backend_that(change))  # type: ignore[arg-type]
    assert found.status == status and word in found.reason


def test_a_process_that_hangs_or_dies_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any) -> Any:
        signal.pause()

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    for work, status in ((hang, "out of time"), (die, "died")):
        monkeypatch.setattr(command, "check", work)
        (verdict,) = command.judged([("handmade/siamese", "inference")], "x86_onednn", 1, 0.5)
        assert verdict.status == status


def test_a_run_that_ends_in_time_leaves_the_rest_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "check", lambda *_: signal.pause())
    started = time.monotonic()
    pairs = [("handmade/siamese", "inference"), ("handmade/unet", "inference")]
    assert list(command.judged(pairs, "x86_onednn", 1, 60.0, until=started + 0.5)) == []
    assert time.monotonic() - started < 10


def test_a_model_that_cannot_be_built_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "LARGEST", 1000)
    with pytest.raises(catalog.NotBuilt, match=r"M parameters"):
        catalog.build("transformers/bert")


def drawn(scale: float, tensors: int) -> Iterator[Any]:
    """Draws of both errors from a heavy tail: they differ by far more than a factor of two, but not always in one direction."""
    exact = [[torch.tensor([1e-9], dtype=torch.float64)] * tensors]
    while True:
        ours, eagers = torch.distributions.Cauchy(0.0, 1e-3).sample((2, tensors, 1)).abs()
        yield [[*(scale * ours)]], [[*eagers]], exact


@pytest.mark.parametrize("model", ["sam2", "sam2_vision_model"])
def test_a_geometry_that_keeps_widths_has_small_images_too(model: str) -> None:
    """Stages of SAM 2 fit together in their own widths only; with its images of 1024 pixels, eager alone trains for minutes."""
    images = catalog.build(f"transformers/{model}").inputs["pixel_values"]
    assert images.shape[-2:] == (geometry.IMAGE, geometry.IMAGE)


def test_errors_of_one_distribution_are_right_and_larger_ones_are_not() -> None:
    torch.manual_seed(0)
    assert judge._typical(drawn(1.0, 1), "fp32") == "" and "6 of 7" in judge._typical(drawn(100.0, 1), "fp32")


def test_one_of_many_tensors_is_not_wrong_by_chance() -> None:
    torch.manual_seed(0)
    draws = drawn(1.0, 1000)
    first = [*itertools.islice(draws, judge.DRAWS - 1)]
    assert any(judge._suspected(first, (0, n), "fp32") for n in range(1000))
    assert judge._typical(itertools.chain(first, draws), "fp32") == ""


def codes(flipped: float, moved: int = 0) -> Iterator[Any]:
    """Draws of 100 codes: ours, eager's and the exact ones. Rounding flips a share of ours and 5% of eager's; ours has `moved`
    wrong codes at fixed places besides."""
    while True:
        exact = torch.randint(9, (100,))
        ours, eager = ((exact + (torch.rand(100) < share)).long() for share in (flipped, 0.05))
        ours[:moved] = exact[:moved] + 1
        yield [[ours]], [[eager]], [[exact]]


@pytest.mark.parametrize(
    ("flipped", "moved", "why"),
    [(0.05, 0, ""), (0.5, 0, "integers are wrong"), (0.0, 1, "1 integers are wrong in every draw")],
    ids=["as eager's", "too many", "a wrong index"],
)
def test_codes_may_flip_where_rounding_flips_eagers(flipped: float, moved: int, why: str) -> None:
    torch.manual_seed(0)
    found = judge._typical(codes(flipped, moved), "bf16")
    assert why in found and bool(why) == bool(found)


@pytest.mark.parametrize("share", [0.0, 1.0], ids=["eager's are exact", "eager's are random"])
def test_codes_that_rounding_does_not_flip_are_eagers(share: float) -> None:
    exact = torch.zeros(100, dtype=torch.long)
    eager = (torch.arange(100) < 100 * share).long()
    draws = itertools.repeat(([[2 * torch.ones_like(exact)]], [[eager]], [[exact]]))
    assert "differ from eager's" in judge._typical(iter(draws), "bf16")


def test_eager_alone_is_never_called_wrong() -> None:
    assert check("handmade/siamese", "training", "eager").status == "right"
    assert torch.get_default_dtype() == torch.float32


def with_stale(place: int) -> Callable[..., Any]:
    """Make a backend that uses the value that one argument had in the first call."""

    def backend(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        first: list[Tensor] = []

        def run(*args: Tensor) -> Any:
            given = [*args]
            first.extend([] if first else [given[place].detach().clone()])
            given[place] = first[0] + (given[place] - given[place].detach())  # with its gradient
            return graph(*given)

        return run

    return backend


def in_one_place(graph: fx.GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
    """A backend that writes all results of the graph to the same memory."""
    first: list[Tensor] = []

    def run(*args: Tensor) -> Any:
        (made,) = graph(*args)
        first.extend([] if first else [made])
        return (first[0].copy_(made),)

    return run


@pytest.mark.parametrize(
    ("mode", "backend", "why"),
    [
        ("calls", "eager", ""),
        ("steps", "eager", ""),
        ("calls", with_stale(2), "call 3: tensor 0"),
        ("steps", with_stale(2), "call 3: tensor 0"),
        ("steps", with_stale(0), "call 3: tensor"),
        ("calls", in_one_place, "call 3 changed what an earlier one returned"),
    ],
    ids=["calls", "steps", "an input", "an input of a step", "a weight", "results"],
)
def test_what_is_stale_shows_in_later_calls(mode: str, backend: Any, why: str) -> None:
    found = check("handmade/siamese", mode, backend)
    assert (found.status, found.reason[: len(why)]) == ("wrong" if why else "right", why)


class Masks(nn.Module):
    """Takes the next rows of a table of masks in each call, and draws a new table for a batch of another size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.batch, self.taken = 0, 0
        self.register_buffer("table", torch.ones(64, 4))

    def forward(self, x: Tensor) -> Tensor:
        if self.batch != len(x):
            self.batch = len(x)
            self.table = nn.functional.dropout(torch.ones_like(self.table))
        mask = self.table[self.taken : self.taken + self.batch]
        self.taken += self.batch
        return self.linear(x) * mask


def assert_judged(net: nn.Module, scale: float) -> None:
    """Check that training is right exactly if the backend's results are."""
    example = catalog.Example(net, {"x": torch.randn(2, 4)}, None)
    backend: Any = backend_that(lambda t: t * scale)
    found = judge.MODES["training"](judge.Verdict("net", "training", "right"), example, backend)
    assert found.status == ("right" if scale == 1.0 else "wrong"), found.reason


@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_calls_begin_with_what_a_module_counted_in_python(scale: float) -> None:
    assert_judged(Masks(), scale)


class Noise(nn.Module):
    """Hides some features in training, chosen by NumPy, as masks of spectrograms are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.from_numpy(np.random.rand(4) < 0.5)


@pytest.mark.parametrize("scale", [1.0, 1.01])
def test_random_numbers_of_numpy_are_eagers(scale: float) -> None:
    """Otherwise other numbers would excuse every error."""
    assert_judged(Noise(), scale)


WIDE = [[torch.ones(4, dtype=torch.float64)] * 2]
RIGHT, FIRST, SECOND, LESS = ([[torch.full((4,), 1 + a), torch.full((4,), 1 + b)]] for a, b in ((0, 0), (1, 0), (0, 1), (0.1, 0)))


@pytest.mark.parametrize(
    ("ours", "other", "status"),
    [
        (FIRST, FIRST, "wrong in aot_eager too"),
        (FIRST, SECOND, "wrong"),
        (FIRST, LESS, "wrong"),
        (FIRST, RIGHT, "wrong"),
        (FIRST, None, "wrong"),
        ([[*FIRST[0], FIRST[0][0]]], [[*FIRST[0], FIRST[0][0]]], "wrong in aot_eager too"),
        ([[*FIRST[0], FIRST[0][0]]], FIRST, "wrong"),
        (None, None, "crashed in aot_eager too"),
        (None, FIRST, "crashed"),
    ],
    ids=["same", "elsewhere", "smaller", "none", "crash", "as many", "more", "crashes", "only ours"],
)
def test_only_the_same_failure_of_aot_eager_is_an_excuse(ours: Any, other: Any, status: str) -> None:
    def run(backend: str) -> Any:
        found = ours if backend == "ours" else other
        if found is None:
            raise RuntimeError(backend)
        return found

    verdict = judge.Verdict("m", "inference", "right")
    assert judge._judge(verdict, run, "ours", RIGHT, WIDE, "fp32", lambda _: RIGHT, None).status == status


def test_draws_beside_aot_eager_excuse_its_errors() -> None:
    def draws(error: float) -> Iterator[Any]:
        return itertools.repeat(([[WIDE[0][0].float() + error]], [[WIDE[0][0].float()]], [[WIDE[0][0]]]))

    assert judge._typical(judge._draws_beside(draws(0.1), draws(0.1)), "fp32") == ""
    assert "6 of 7" in judge._typical(judge._draws_beside(draws(0.1), draws(0.01)), "fp32")


def test_the_page_holds_what_the_records_say() -> None:
    assert page(records()) == PAGE.read_text(), "run: python -m tests.zoo.page"


def test_the_newest_verdict_counts_unless_it_says_nothing() -> None:
    runs = [("wrong", "crashed", "out of time"), ("right", "out of time", "right"), ("out of time", "not built", "right")]
    zoos = [[{"model": f"m/{k}", "mode": "inference", "status": status} for k, status in enumerate(run)] for run in runs]
    given = [{"backend": "b", "where": "", "zoo": zoo} for zoo in zoos]
    assert [v.status for v in newest(given)] == ["right", "crashed", "right"]
    assert "`m/1`, inference: crashed" in page(given)


def test_parts_of_a_detector_are_made_from_what_the_detector_sets() -> None:
    """The class of a backbone's configuration has no default for its name or for the stages that are read."""
    pytest.importorskip("timm", reason="timm is optional; runs with it: pip install timm torchvision --no-deps")
    config: Any = catalog.build("transformers/detr").module.config
    backbone = config.backbone_config
    assert (backbone.backbone, list(backbone.out_indices)) == ("resnet18", [1, 2, 3, 4])


def test_what_an_architecture_lacks_in_this_version_does_no_harm() -> None:
    from transformers import BertConfig

    made = geometry.small(BertConfig, geometry.AS_WHOLE, {"nosuch": 1, "backbone_config": {"nosuch": 2}})
    assert made.hidden_size == geometry.WIDTH


def test_videos_and_spectrograms_are_made_where_images_and_short_forms_are_rejected() -> None:
    assert catalog.build("transformers/timesformer").inputs["pixel_values"].dim() == 5
    assert catalog.build("transformers/glmasr_encoder").inputs["input_features"].shape[1:] == (16, 64)

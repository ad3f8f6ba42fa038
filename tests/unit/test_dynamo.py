"""The entry point for `torch.compile`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

from fusewright import dynamo, pipeline


@pytest.mark.parametrize("was", [True, False])
def test_the_collector_rests_while_a_graph_is_compiled(was: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was else gc.disable)()
        with pytest.raises(KeyError), dynamo.gc_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is was
    finally:
        (gc.enable if before else gc.disable)()


def test_the_collector_rests_while_dynamo_traces_and_walks_only_what_is_new() -> None:
    """A walk over torch's and a model's objects takes a third of a second; a compilation makes enough objects for one to be due."""
    seen: list[tuple[bool, int]] = []
    collected: list[int] = []

    class Garbage:
        pass

    @torch.compiler.assume_constant_result
    def traced() -> float:  # Dynamo calls it while it traces
        one = Garbage()
        one.itself = one  # type: ignore[attr-defined]
        left.append(weakref.ref(one))
        seen.append((gc.isenabled(), len(gc.get_objects())))
        return 2.0

    left: list[weakref.ref[Garbage]] = []
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.sin() * traced(), backend="fusewright_null")
    compiled(torch.ones(2))  # the reset has dropped the hooks: a backend sets them again
    old = len(gc.get_objects())

    def collection(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"] == 2:
            collected.append(len(gc.get_objects()))

    gc.callbacks.append(collection)
    try:
        compiled(torch.ones(2, 3))
    finally:
        gc.callbacks.remove(collection)
    enabled, apart = seen[1]
    assert not enabled and apart < old / 2, "the collector rests, and old objects are set apart"
    assert max(collected) < old / 2 and left[1]() is None
    assert gc.isenabled() and not gc.get_freeze_count()


def test_objects_that_a_program_froze_stay_frozen() -> None:
    dynamo.entry("fusewright_null")  # sets the hooks, after whatever reset there was
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        torch.compile(lambda x: x.cos(), backend="fusewright_null")(torch.ones(2))
        assert gc.get_freeze_count() >= frozen / 2 and gc.isenabled()
    finally:
        gc.unfreeze()


def test_the_collector_pauses_while_either_graph_of_a_training_step_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    collecting, compile_graph = {}, pipeline.compile_graph

    def spy(*args: Any) -> Any:
        collecting[args[3]] = gc.isenabled()
        return compile_graph(*args)

    monkeypatch.setattr(pipeline, "compile_graph", spy)
    torch.compiler.reset()
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x.sin().sum(), backend="fusewright_null")(x).backward()
    assert collecting == {"forward": False, "backward": False} and gc.isenabled()


def test_a_compiled_model_is_pickled_as_any_other() -> None:
    torch.compiler.reset()
    model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    for backend in ("fusewright_null", "fusewright"):
        compiled = torch.compile(model, backend=backend, options={})
        for _ in ("before its first call", "after it"):
            assert torch.equal(pickle.loads(pickle.dumps(compiled))(x), compiled(x))


def test_copies_of_an_entry_point_are_the_same() -> None:
    one = dynamo.entry("fusewright_null")
    assert copy.deepcopy(one) is one and pickle.loads(pickle.dumps(one)) is one
    assert one.__name__ == "fusewright_null"


@pytest.mark.parametrize("masks", [("tgt_mask",), ("tgt_mask", "src_mask", "tgt_key_padding_mask", "memory_key_padding_mask")])
@pytest.mark.parametrize("training", [False, True])
def test_masks_of_a_transformer_are_not_read_while_it_is_traced(masks: tuple[str, ...], training: bool) -> None:
    """Torch compares each with a causal mask, in Python; its graph broke there."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = torch.nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True).train(training)
    src, tgt = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    part = torch.where(torch.rand(5, 5) > 0.3, 0.0, float("-inf")).fill_diagonal_(0)
    given = {
        "tgt_mask": torch.nn.Transformer.generate_square_subsequent_mask(7), "src_mask": part,
        "tgt_key_padding_mask": torch.tensor([[0.0] * 7, [0.0] * 5 + [float("-inf")] * 2]),
        "memory_key_padding_mask": torch.tensor([[0.0] * 5, [0.0] * 4 + [float("-inf")]]),
    }  # fmt: skip
    given = {name: given[name] for name in masks}
    with torch.set_grad_enabled(training):
        compiled = torch.compile(model, backend="fusewright_interp", fullgraph=True)
        torch.testing.assert_close(compiled(src, tgt, **given), model(src, tgt, **given))


@pytest.mark.parametrize(("backend", "options"), [("x86_onednn", {}), ("nvidia_triton", {"simulate": True})], ids=str)
def test_a_default_device_is_the_programs_alone(backend: str, options: dict[str, Any]) -> None:
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.GELU()).eval()
    x = torch.randn(1, 3, 8, 8)
    compiled = torch.compile(module, backend=backend, options={"cache": False, "fallback": "allow", **options})
    with torch.device("meta"), torch.no_grad():
        ours, theirs = compiled(x), module(x)
    torch.testing.assert_close(ours, theirs)

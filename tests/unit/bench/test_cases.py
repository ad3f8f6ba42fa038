"""Cases for large devices: geometries, decoding with a cache, training with dropout, contenders with options."""

from __future__ import annotations

import copy

import pytest
import torch

from fusewright.bench import accuracy
from fusewright.bench.accuracy import reference, train_reference
from fusewright.bench.cases import check_case, counts_bytes, large, resolve, resolve_step
from fusewright.bench.contenders import UnknownContender, from_backend
from fusewright.bench.suite import SUITE, TRAINABLE, UnknownModel, flatten_outputs, on_device


@pytest.mark.parametrize("name", large.names())
def test_every_large_model_runs_and_trains_small(name: str) -> None:
    built = resolve(name, "small", "bf16")
    with torch.no_grad():
        assert flatten_outputs(built.run())[0].dtype == torch.bfloat16
    assert torch.isfinite(resolve_step(name, "small", "fp32").backward())


def test_the_suite_has_no_large_model() -> None:
    assert not any(large.is_large(name) for name in (*SUITE, *TRAINABLE))


def test_a_step_that_drops_is_compared_without_dropout() -> None:
    step = resolve_step("large:bert", "small", "fp32")
    assert step.module.training and step.backward() != step.backward()
    compared = step.repeatable()
    assert not compared.module.training and step.module.training
    first, second = compared.loss_and_grads(), compared.loss_and_grads()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    wide = train_reference(step)
    assert wide[0].dtype == torch.float64
    torch.testing.assert_close(first[0].double(), wide[0], rtol=1e-5, atol=1e-5)


def test_decoding_gives_the_same_logits_at_every_call() -> None:
    built = resolve("decode:llama", "small", "fp32")
    with torch.no_grad():
        first, second = flatten_outputs(built.run()), flatten_outputs(built.run())
    assert len(first) == built.extra["tokens"] == 4
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1])


def test_decoding_is_what_the_whole_sequence_gives() -> None:
    """The logits of the steps equal those of one call without a cache."""
    built = resolve("decode:llama", "small", "fp32")
    decoder = built.module
    assert decoder is not None
    model, cache = copy.deepcopy(decoder.model), decoder.cache
    seen = [layer.keys.clone() for layer in cache.layers]
    with torch.no_grad():
        step_by_step = torch.cat(flatten_outputs(built.run()), 1)
        assert not torch.equal(seen[0], cache.layers[0].keys), "the steps wrote the cache"
        wide = torch.cat(reference(built), 1)
    assert next(model.parameters()).dtype == cache.layers[0].keys.dtype == torch.float32, "the reference is a copy"
    torch.testing.assert_close(step_by_step.double(), wide, rtol=1e-4, atol=1e-4)


def test_one_step_is_the_first_of_many() -> None:
    one, many = resolve("decode:llama", "small", "fp32", steps=1), resolve("decode:llama", "small", "fp32")
    with torch.no_grad():
        (first,), steps = flatten_outputs(one.run()), flatten_outputs(many.run())
    assert one.extra["tokens"] == 1 and first.shape == steps[0].shape


def test_a_decoding_moves_with_all_that_a_call_reads() -> None:
    """This allows judging it on the host if its device lacks fp64."""
    built = on_device(resolve("decode:llama", "small", "fp32"), "meta")
    assert built.module is not None
    cache = [t for layer in built.module.cache.layers for t in (layer.keys, layer.values, layer.cumulative_length)]
    assert {t.device.type for t in (*built.module.parameters(), *cache, *built.args)} == {"meta"}
    with torch.no_grad():
        assert {t.device.type for t in flatten_outputs(built.run())} == {"meta"}


@pytest.mark.parametrize("name", ["decode:llama", "large:bert"])
def test_fp64_is_computed_on_the_host_where_the_device_has_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    on_its_own = reference(resolve(name, "small", "fp32"))
    monkeypatch.setattr(accuracy, "computes_fp64", lambda device: False)
    monkeypatch.setattr(accuracy, "on_device", lambda built, device: moved.append(device) or on_device(built, device))
    assert all(torch.equal(a, b) for a, b in zip(reference(resolve(name, "small", "fp32")), on_its_own, strict=True))
    assert moved == ["cpu"]


def test_a_step_reads_its_weights_and_its_cache() -> None:
    built = resolve("decode:llama", "small", "bf16")
    assert built.module is not None
    weights = sum(p.nbytes for name, p in built.module.named_parameters() if "embed_tokens" not in name)
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in built.module.cache.layers)
    assert built.extra["bytes"] == weights + cache


def test_names_are_checked_before_anything_is_built() -> None:
    for name, train, says in (
        ("decode:lama", False, "did you mean 'decode:llama'"), ("decode:llama", True, "leave out --train"),
        ("large:brt", True, "did you mean 'large:bert'"), ("brt", False, "there is no model 'brt'"),
        ("kernel:softmax:big", False, "there is no kernel"), ("kernel:softmax:64x768", True, "leave out --train"),
        ("graph:gnc", False, "did you mean 'graph:gcn'"), ("graph:kmeans_numpy", True, "cannot be trained"),
    ):  # fmt: skip
        with pytest.raises(UnknownModel, match=says):
            check_case(name, train)
    assert counts_bytes("decode:llama") and counts_bytes("kernel:softmax:64x768") and not counts_bytes("large:bert")


def test_a_contender_with_options() -> None:
    found = from_backend('inductor[max_autotune=true;epilogue_fusion="x"]')
    assert found.options == {"max_autotune": True, "epilogue_fusion": "x"} and found.backend == "inductor"
    assert found.name == 'inductor[max_autotune=true;epilogue_fusion="x"]'
    assert from_backend("inductor-freezing[cpp_wrapper=true]").options == {"freezing": True, "cpp_wrapper": True}
    with pytest.raises(UnknownContender, match="write key=value"):
        from_backend("inductor[fast]")
    assert from_backend("reduce-overhead").mode == "reduce-overhead"

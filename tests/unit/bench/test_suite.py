"""From names to models: the suite, files, dtypes, training steps."""

from pathlib import Path

import pytest
import torch

from fusewright.bench.suite import (
    SUITE,
    TRAINABLE,
    UnknownModel,
    build,
    check_name,
    flatten_outputs,
    train_step,
)

TOYS = Path(__file__).with_name("toy_models.py")


@pytest.mark.parametrize("name", [*SUITE, *TRAINABLE])
def test_every_model_runs_small_and_is_the_same_each_time(name):
    first, second = build(name, "small"), build(name, "small")
    with torch.no_grad():
        outputs = flatten_outputs(first.run())
        again = flatten_outputs(second.run())
    assert outputs and all(x.isfinite().all() for x in outputs)
    assert all(torch.equal(x, y) for x, y in zip(outputs, again, strict=True))
    assert not first.module.training


def test_biases_and_norms_are_not_trivial():
    module = build("resnet50", "small").module
    vectors = [p for p in module.parameters() if p.dim() == 1]
    assert vectors and not any((v == v[0]).all() for v in vectors)
    means = [b for n, b in module.named_buffers() if n.endswith("running_mean")]
    assert means and not any((m == 0).any() for m in means)


def test_building_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    build("gpt2", "small")
    train_step("gpt2_small", "small")
    assert torch.equal(before, torch.get_rng_state())


def test_dtypes():
    half = build("vit", "small", "bf16")
    assert half.module.dtype == half.kwargs["pixel_values"].dtype == torch.bfloat16
    amp = build("vit", "small", "amp")
    assert amp.module.dtype == torch.float32
    with torch.no_grad():
        assert amp.run().logits.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="did you mean 'bf16'"):
        build("vit", "small", "bf17")


def test_a_model_of_a_file():
    built = build(f"{TOYS}:mlp")
    assert built.run().shape == (4, 8)
    built = build(f"{TOYS}:function", dtype="bf16")
    doubled, plus = flatten_outputs(built.run())
    assert doubled.dtype == torch.bfloat16
    assert doubled.tolist() == plus.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("brt", "no model 'brt'; did you mean 'bert'"),
        (str(TOYS), "name its function too"),
        ("no_such_file.py:f", "there is no file"),
        (f"{TOYS}:mlpp", "did you mean 'mlp'"),
        (f"{TOYS}:NUMBER", "no function 'NUMBER'"),
        (f"{TOYS}:not_a_model", "must return"),
    ],
)
def test_a_bad_name_is_refused_with_the_fix(name, says):
    with pytest.raises(UnknownModel, match=says):
        build(name)


def test_only_models_with_labels_train():
    check_name("resnet18", train=True)
    with pytest.raises(UnknownModel, match="no model 'bert'; did you mean 'bert_small'"):
        check_name("bert", train=True)
    check_name(f"{TOYS}:mlp", train=True)  # a user's model has a loss, or else the squares of its outputs


def test_outputs_of_an_unknown_type_are_not_passed_over():
    with pytest.raises(TypeError, match="Path"):
        flatten_outputs([torch.ones(1), TOYS])
    assert [x.item() for x in flatten_outputs({"a": (1, None), "b": [torch.tensor(2)]})] == [1, 2]


@pytest.mark.parametrize("name", TRAINABLE)
def test_training_steps_lower_the_loss_and_forks_are_independent(name):
    step = train_step(name, "small")
    fork = step.fork()
    losses = [float(step()) for _ in range(3)]
    assert losses[2] < losses[0]
    assert float(fork()) == losses[0]
    loss, *grads = step.fork().loss_and_grads()
    assert loss.dim() == 0
    assert [g.shape for g in grads] == [p.shape for p in step.module.parameters()]

"""Small graph layers: right by the fp64 rule in training and inference, deterministic, one kernel per aggregation."""

from __future__ import annotations

import pytest
import torch

from fusewright import registry
from fusewright.bench.accuracy import compare, reference, train_reference
from fusewright.bench.cases import graphs
from fusewright.bench.suite import UnknownModel, flatten_outputs

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.skipif(not registry.info("x86_onednn").available, reason="x86_onednn does not run here"),
]
LAYERS = graphs.names(train=True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_inference(name: str, dtype: str) -> None:
    built = graphs.build_graph(name, "small", dtype)
    fn = torch.compile(built.fn, backend="x86_onednn")
    with torch.no_grad():
        eager, ours = flatten_outputs(built.run()), flatten_outputs(built.run(fn))
    verdict = compare(reference(built), eager, ours, dtype)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", ["fp32", "amp"])
def test_loss_and_gradients(name: str, dtype: str) -> None:
    step = graphs.graph_step(name, "small", dtype)
    step.batch["x"].requires_grad_()
    eager = [*step.fork().loss_and_grads(), step.batch["x"].grad.clone()]
    step.batch["x"].grad = None
    mine = step.fork()
    mine.compiled = torch.compile(mine.module, backend="x86_onednn")
    ours = [*mine.loss_and_grads(), step.batch["x"].grad.clone()]
    verdict = compare(_wide(step), eager, ours, dtype)
    assert verdict.passed, verdict.reason


def _wide(step: graphs.TrainStep) -> list[torch.Tensor]:
    """Loss and gradients in fp64, the features' gradient last."""
    wide = step.fork()
    wide.module.double()
    wide.dtype = "fp32"
    x = step.batch["x"].detach().double().requires_grad_()
    wide.batch = {**step.batch, "x": x}
    found = wide.loss_and_grads()
    assert x.grad is not None
    torch.testing.assert_close(found, train_reference(step))
    return [*found, x.grad]


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_bits_whatever_the_number_of_threads(name: str) -> None:
    step = graphs.graph_step(name, "small")
    before = torch.get_num_threads()
    runs = []
    for threads in (1, 2, before):
        torch.set_num_threads(threads)
        mine = step.fork()
        mine.compiled = torch.compile(mine.module, backend="x86_onednn")
        runs.append(mine.loss_and_grads())
    torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_an_edge_out_of_range_raises_as_in_eager() -> None:
    built = graphs.build_graph("graph:sage_sum", "small")
    built.kwargs["edges"][1, 3] = 60
    fn = torch.compile(built.fn, backend="x86_onednn")
    for run in (built.fn, fn):
        with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
            built.run(run)


def test_names() -> None:
    assert "graph:gcn" in LAYERS
    with pytest.raises(UnknownModel, match="graph:gcn"):
        graphs.build_graph("graph:gnc")
    with pytest.raises(UnknownModel, match="cannot be trained"):
        graphs.graph_step("graph:kmeans_numpy")

"""Every code block of docs/libraries.md runs, with small models built from their configurations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ci.bench.libraries import IN_PLACE, PAGE, blocks, run
from fusewright.report import recording

BLOCKS = blocks()

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not here: it comes with the extra `libraries` (pip install '.[libraries]')")


@contextlib.contextmanager
def compiles() -> Iterator[None]:
    """Check that the block compiles something; torch does not report it otherwise."""
    with recording() as graphs:
        yield
    assert graphs


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return Net()


def batches() -> list[torch.Tensor]:
    return list(torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1)))


def trained(step: Callable[[torch.nn.Module], None]) -> list[torch.Tensor]:
    """Return the weights of `net` after `step` has trained it."""
    model = net()
    step(model)
    return [p.detach() for p in model.parameters()]


def by_hand(model: torch.nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def same(got: Any, want: Any) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers comes with fusewright[bench]")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def test_every_block_has_a_test() -> None:
    assert len(BLOCKS) == 5 == PAGE.read_text().count("```python")


def test_generate_with_a_static_cache_takes_transformers_own_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), torch.arange(5)[None]
    from transformers import CompileConfig

    monkeypatch.setattr(CompileConfig, "_compile_all_devices", True)  # otherwise generate does not compile on CPUs
    want = model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation="static", disable_compile=True)
    with compiles():
        assert torch.equal(run("transformers: generate", model=model, ids=ids)["tokens"], want)
    assert model._compiled_call is not None


@pytest.mark.parametrize("title", [t for t in BLOCKS if "in place" in t])
def test_a_model_is_compiled_in_place(title: str) -> None:
    model, ids = llama(), torch.arange(5)[None]
    with torch.no_grad(), compiles():
        want = model(ids).logits
        run(title, model=model)
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-5)


def test_weights_of_torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is an optional dependency of fusewright-int8 (extra `quantize`)")
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).eval(), torch.randn(4, 64)
    with torch.no_grad(), compiles():
        torch.testing.assert_close(run("torchao", model=model)["compiled"](x), model(x), rtol=1e-4, atol=1e-5)


@pytest.fixture
def alone() -> Iterator[None]:
    """Isolate accelerate's per-process state."""
    state = library("accelerate").state
    state.AcceleratorState._reset_state(True)
    yield
    state.AcceleratorState._reset_state(True)


@pytest.mark.usefixtures("alone")
def test_accelerate_trains_a_model_that_was_compiled_in_place() -> None:
    def step(model: torch.nn.Module) -> None:
        accelerator = library("accelerate").Accelerator(cpu=True)
        run(IN_PLACE, model=model)
        compiled, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        for x in batches():
            optimizer.zero_grad()
            accelerator.backward(compiled(x).square().mean())
            optimizer.step()
        assert accelerator.unwrap_model(compiled) is model

    with compiles():
        found = trained(step)
    same(found, trained(by_hand))


@pytest.mark.usefixtures("alone")
def test_transformers_trainer_trains_a_model_that_was_compiled_in_place(tmp_path: Path) -> None:
    library("accelerate")
    from transformers import Trainer, TrainingArguments

    how = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, seed=3
    )
    rows = [{"input_ids": torch.arange(k, k + 6), "labels": torch.arange(k, k + 6)} for k in range(16)]

    def weights(in_place: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = llama()
        if in_place:
            run("transformers: in place", model=model)
        Trainer(model=model, args=how, train_dataset=rows).train()
        return [p.detach() for p in model.parameters()]

    with compiles():
        found = weights(True)
    same(found, weights(False))


def test_lightning_fits_a_compiled_module() -> None:
    lightning = library("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, x: torch.Tensor, at: int) -> torch.Tensor:
            return self.model(x).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def step(model: torch.nn.Module) -> None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        loader = torch.utils.data.DataLoader(batches(), batch_size=None)
        compiled = run("Lightning", module=Module(model))["compiled"]
        lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet).fit(compiled, loader)

    with compiles():
        found = trained(step)
    same(found, trained(by_hand))


@torch.no_grad()
def in_place(module: torch.nn.Module, *calls: Callable[[], Any]) -> None:
    """Check that `calls` give the same results before and after `module` is compiled in place."""
    want = [call() for call in calls]
    run(IN_PLACE, model=module)
    assert module._compiled_call_impl is not None
    with compiles():
        same([call() for call in calls], want)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_models_of_timm(name: str) -> None:
    sizes = {"img_size": 32} if "vit" in name else {}
    try:
        timm = library("timm")
    except RuntimeError as e:  # torchvision was built for another torch
        pytest.skip(f"timm does not load ({e}); install the torchvision that belongs to this torch")
    model = timm.create_model(name, num_classes=5, **sizes).eval()
    x = torch.randn(1, 3, 32, 32)
    in_place(model, lambda: model(x))


def test_a_unet_of_diffusers() -> None:
    sizes = {"sample_size": 8, "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    library("diffusers")
    from diffusers import UNet2DModel

    torch.manual_seed(0)
    unet = UNet2DModel(attention_head_dim=8, **sizes, **blocks).eval()
    x = torch.randn(1, 3, 8, 8)
    in_place(unet, *(lambda t=t: unet(x, t).sample for t in (torch.tensor(1), torch.tensor(7))))


def test_convolutions_of_torch_geometric_and_graphs_of_changing_size() -> None:
    library("torch_geometric")
    from torch_geometric.nn import GCN

    torch.manual_seed(0)
    model = GCN(8, 16, num_layers=2, out_channels=4).eval()

    def graph(nodes: int) -> Callable[[], Any]:
        x, edges = torch.randn(nodes, 8), torch.randint(0, nodes, (2, 3 * nodes))
        return lambda: model(x, edges)

    in_place(model, graph(6), graph(9), graph(13))


def test_a_sentence_transformer(tmp_path: Path) -> None:
    sentences = library("sentence_transformers")
    from transformers import BertConfig, BertModel, BertTokenizerFast

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path)
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    model = sentences.SentenceTransformer(str(tmp_path), device="cpu")
    in_place(model[0], lambda: model.encode(["a b c", "d"], convert_to_tensor=True))


def test_torch_compiles_nothing_of_its_own_classes_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    run(IN_PLACE, model=model)
    with recording() as graphs:
        model(torch.ones(2, 8))
    assert not graphs  # as the page says; once torch supports it, remove that part of the page and this test
    with compiles():
        torch.compile(model, backend="fusewright")(torch.ones(2, 8))

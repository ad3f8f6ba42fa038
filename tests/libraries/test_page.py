"""Every block of docs/libraries.md runs, with small models made of their configurations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs/libraries.md"
BLOCKS = dict(re.findall(r"```python\n# ([^\n]+)\n(.*?)```", PAGE.read_text(), re.DOTALL))

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]


def run(title: str, **names: Any) -> dict[str, Any]:
    """The names that a block of the page leaves behind."""
    found = {"torch": torch, **names}
    exec(compile(BLOCKS[title], str(PAGE), "exec"), found)
    return found


def llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers comes with fusewright[bench]")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()


def test_every_block_has_a_test() -> None:
    assert len(BLOCKS) == 4 == PAGE.read_text().count("```python")


def test_generate_with_a_static_cache_takes_transformers_own_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), torch.arange(5)[None]
    from transformers import CompileConfig

    monkeypatch.setattr(CompileConfig, "_compile_all_devices", True)  # generate leaves CPUs alone else
    want = model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation="static", disable_compile=True)
    assert torch.equal(run("transformers: generate", model=model, ids=ids)["tokens"], want)
    assert model._compiled_call is not None


@pytest.mark.parametrize("title", [t for t in BLOCKS if "in place" in t])
def test_a_model_is_compiled_in_place(title: str) -> None:
    model, ids = llama(), torch.arange(5)[None]
    with torch.no_grad():
        want = model(ids).logits
        run(title, model=model)
        torch.testing.assert_close(model(ids).logits, want, rtol=1e-4, atol=1e-5)


def test_weights_of_torchao() -> None:
    pytest.importorskip("torchao", reason="torchao is an optional dependency of fusewright-int8 (extra `quantize`)")
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()).eval(), torch.randn(4, 64)
    with torch.no_grad():
        torch.testing.assert_close(run("torchao", model=model)["compiled"](x), model(x), rtol=1e-4, atol=1e-5)

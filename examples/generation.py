"""Generate text with a static key-value cache: shapes do not change, so one compiled graph serves every token.

The model is a small Llama built from its configuration; nothing is downloaded. It needs transformers (`fusewright[bench]`).
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache


def generated(model: LlamaForCausalLM, step: LlamaForCausalLM, prompt: torch.Tensor, tokens: int) -> torch.Tensor:
    """Decode greedily: run the prompt through `model`, then one token per call through `step`."""
    length = prompt.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length + tokens)
    places = torch.arange(length + tokens)[None]
    out = model(prompt, past_key_values=cache, position_ids=places[:, :length], use_cache=True)
    found = [out.logits[:, -1:].argmax(-1)]
    for at in range(length, length + tokens - 1):
        out = step(found[-1], past_key_values=cache, position_ids=places[:, at : at + 1], use_cache=True)
        found.append(out.logits[:, -1:].argmax(-1))
    return torch.cat(found, 1)


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).eval()
    prompt = torch.randint(128, (1, 6))
    step = torch.compile(model, backend="fusewright")
    with torch.no_grad():
        expected, found = (generated(model, by, prompt, 8) for by in (model, step))
    print(f"tokens: {found[0].tolist()}")
    assert torch.equal(found, expected)


if __name__ == "__main__":
    main()

"""Time `generate` of transformers with a static cache on a GPU: greedy decoding of one sequence, ms a token. The table comes last.

    python -m ci.gpu.generate [--families gemma3_text,mixtral] [--tokens 96] [--turns 4] [--limit 150] [--json out.json]

Ours beside what `generate` compiles by default, Inductor's reduce-overhead, and eager with a cache that grows. Each backend of each
family is a process of its own: some families compile at once, and one process generates while all others wait. Prefill, which
`generate` never compiles, is in all times. Weights are random; tokens equal eager's, up to the first that two logits decide which
differ by rounding. `--device cpu` tries the tool with tiny models. Exit code 1 if ours failed or is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ci.gpu import turns
from fusewright import report

OURS = {"cuda": "nvidia_triton", "cpu": "x86_onednn"}
DEFAULT = "reduce-overhead"
PROMPT, NEAR = 64, 0.1
"""Tokens of the prompt, and the distance of two logits, in parts of the largest, that rounding to bf16 makes where it decides
between experts. A token without relation to the logits is some 1.0 away."""

WIDE = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 4096,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {}, "phi3": {"pad_token_id": 0}, "cohere2": {},
    "mistral": {"sliding_window": 4096}, "gemma3_text": {"sliding_window": 64},
    "gpt_oss": {"intermediate_size": 1024, "num_local_experts": 16, "num_experts_per_tok": 4, "sliding_window": 128},
    "qwen3_moe": {"moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 8},
    "mixtral": {"intermediate_size": 2048, "num_local_experts": 8, "sliding_window": None},
    "gpt2": {"n_embd": 768, "n_layer": 12, "n_head": 12}, "opt": {}, "bloom": {"n_layer": 12, "n_head": 16},
    "t5": {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ff": 3072, "d_kv": 64}, "bart": {},
}  # fmt: skip
OWN = ("gpt2", "t5", "bart", "opt")
"""Families whose geometry is their configuration's default, but for what is said."""


@dataclass(frozen=True)
class Job:
    """A family by one backend, in a process."""

    family: str
    backend: str
    device: str
    tokens: int
    folder: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    if unknown := set(given.families.split(",")) - FAMILIES.keys():
        parser.error(f"no family: {', '.join(sorted(unknown))}; known are {', '.join(FAMILIES)}")
    if given.job is not None:
        turns.serve(partial(_begin, Job(**json.loads(given.job))))
        return 0
    ours = OURS[given.device]
    command = " ".join(["python -m ci.gpu.generate", *(sys.argv[1:] if argv is None else argv)])
    head = f"{'ms a token':12s} {'eager':>8s} {DEFAULT:>16s} {ours:>14s}  over {DEFAULT}, over eager"
    lines, rows = [head], list[dict[str, Any]]()
    for row in _rows(given):
        rows.append(row)
        lines.append(_line(row))
        print(lines[-1], flush=True)
        if given.json:  # at once, for a run that is cut short
            given.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
    ratios = [[r[key] for r in rows if key in r] for key in ("over_default", "over_eager")]
    means = ", ".join(f"{statistics.geometric_mean(found):.2f}x" for found in ratios if found)
    print("\n".join(["", *lines, f"geometric means: {means}"]))
    return int(any(row["outcome"] != "right" for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=4, help="times that each backend generates, timed")
    parser.add_argument("--limit", type=float, default=150, help="seconds after which a process that compiles counts as hung")
    parser.add_argument("--at-once", type=int, default=4, help="families that compile at the same time")
    parser.add_argument("--device", choices=OURS, default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser


# ---------------------------------------------------------------- the parent


def _rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the row of each family as soon as it is timed. No process is left behind."""
    families, started = given.families.split(","), list[turns.Group]()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            for k in range(0, len(families), given.at_once):
                groups = {f: _groups(f, given, folder) for f in families[k : k + given.at_once]}
                beside = [g for of_family in groups.values() for g in of_family.values()]
                started += beside
                turns.hear(beside, given.limit)
                for family in groups:
                    yield _row(family, groups[family], given, Path(folder))
        finally:
            turns.end([g for g in started if g.running()], 0)


def _groups(family: str, given: argparse.Namespace, folder: str) -> dict[str, turns.Group]:
    found = {}
    for backend in ("eager", DEFAULT, OURS[given.device]):
        job = Job(family, backend, given.device, given.tokens, folder)
        threads = str(max(1, (os.cpu_count() or 1) // given.at_once))
        caches = turns.own_caches(folder, f"{family}.{backend}")
        env = {**os.environ, **caches, "TORCHINDUCTOR_COMPILE_THREADS": threads, "OMP_NUM_THREADS": threads}
        args = [sys.executable, "-m", "ci.gpu.generate", "--job", json.dumps(asdict(job))]
        found[backend] = turns.Group(f"{family}.{backend}", [turns.Command(args, env)], Path(folder))
    return found


def _row(family: str, groups: Mapping[str, turns.Group], given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Time the backends of a family in turns, and compare their tokens with eager's."""
    ours, ms = OURS[given.device], {b: list[float]() for b in groups}
    for k in range(given.turns):
        for backend in list(groups)[:: -1 if k % 2 else 1]:
            for answers in turns.ask([groups[backend]], "turn", given.limit).values():
                ms[backend].append(answers[0])
    told = {b: answers[0] for b, g in groups.items() for answers in turns.ask([g], "result", given.limit).values()}
    turns.end(list(groups.values()), given.limit)
    keys = {ours: "ours", DEFAULT: "default", "eager": "eager"}
    row: dict[str, Any] = {"family": family, **{f"{keys[b]}_ms": round(statistics.median(ms[b]), 3) for b in told}}
    for other in {DEFAULT, "eager"} & told.keys() if ours in told else ():
        row[f"over_{keys[other]}"] = round(turns.ratio(ms[other], ms[ours]), 3)
    verdicts = {b: _agreed(family, b, folder) for b in told if b != "eager" and "eager" in told}
    row |= {"plans": told.get(ours, ""), "verdicts": verdicts, "outcome": verdicts.get(ours, "failed")}
    words = {b: " ".join([g.outcome, *g.words.splitlines()[-1:]]) for b, g in groups.items() if g.outcome}
    return row | ({"words": words} if words else {})


def _agreed(family: str, backend: str, folder: Path) -> str:
    """Compare tokens with eager's up to the first that differs, which must be as good a choice by eager's logits."""
    its, eager = (torch.load(folder / f"{family}.{b}.pt") for b in (backend, "eager"))
    apart = (its["tokens"] != eager["tokens"]).nonzero()
    if not len(apart):
        return "right"
    k = int(apart[0])
    logits = eager["logits"][k]
    gap = float((logits.max() - logits[its["tokens"][k]]) / logits.abs().max())
    return "right" if gap <= NEAR else f"wrong: token {k}, whose logit is {gap:.3f} of the largest below the best"


def _line(row: Mapping[str, Any]) -> str:
    ms = [f"{row[f'{k}_ms']:.2f}" if f"{k}_ms" in row else "-" for k in ("eager", "default", "ours")]
    over = [f"{row[f'over_{k}']:.2f}x" if f"over_{k}" in row else "-" for k in ("default", "eager")]
    told = "; ".join([row["outcome"], row["plans"], *(f"{b}: {w}" for b, w in row.get("words", {}).items())])
    return f"{row['family']:12s} {ms[0]:>8s} {ms[1]:>16s} {ms[2]:>14s}  {', '.join(over)}  {told}"


# ---------------------------------------------------------------- a process


def _begin(job: Job) -> dict[str, Callable[[], Any]]:
    """Build the model and generate until all is compiled; return what the parent may ask for."""
    model, ids = _model(job), torch.randint(2, 250, (1, PROMPT), device=job.device)
    how = _how(job)
    wait = torch.cuda.synchronize if job.device == "cuda" else lambda: None

    def generate(**more: Any) -> Any:
        return model.generate(ids, **how, **more)

    def turn() -> float:
        wait()
        start = time.perf_counter()
        generate()
        wait()
        return (time.perf_counter() - start) * 1e3 / job.tokens

    def result() -> str:
        with report.recording():
            made = generate(return_dict_in_generate=True, output_logits=job.backend == "eager")
        kept: dict[str, Tensor] = {"tokens": made.sequences[0, -job.tokens :].cpu()}
        if job.backend == "eager":
            kept["logits"] = torch.stack([x[0].float().cpu() for x in made.logits])
        torch.save(kept, f"{job.folder}/{job.family}.{job.backend}.pt")
        replayed, bugs = sum(r.replay.startswith("replayed") for r in reports), [b for r in reports for b in r.bugs]
        return "; ".join([f"{replayed} of {len(reports)} plans replayed", *bugs]) if reports else ""

    with report.recording() as reports:
        for _ in range(3):
            generate()
    return {"turn": turn, "result": result}


def _how(job: Job) -> dict[str, Any]:
    from transformers import CompileConfig

    CompileConfig._compile_all_devices = job.device == "cpu"
    how: dict[str, Any] = {"max_new_tokens": job.tokens, "min_new_tokens": job.tokens, "do_sample": False}
    if job.backend == "eager":
        return how | {"disable_compile": True}
    made = CompileConfig() if job.backend == DEFAULT else CompileConfig(backend=job.backend, mode=None)
    made._compile_all_devices = job.device == "cpu"
    return how | {"cache_implementation": "static", "compile_config": made}


def _model(job: Job) -> Any:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[job.family]
    sizes = WIDE if job.device == "cuda" else SMALL
    config = kind(**({} if job.family in OWN and job.device == "cuda" else sizes) | _own(job))
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(job.device):
        model = auto.from_config(config, dtype=torch.bfloat16 if job.device == "cuda" else torch.float32).eval()
    told = model.generation_config
    told.eos_token_id, told.forced_eos_token_id, told.forced_bos_token_id = None, None, None
    told.pad_token_id, told.bos_token_id = 0, 1
    if config.is_encoder_decoder:
        told.decoder_start_token_id = 1
    return model


def _own(job: Job) -> dict[str, Any]:
    """What a family sets, without widths where all is small."""
    own = FAMILIES[job.family]
    if job.device == "cuda":
        return own
    small = {"n_embd": 64, "n_layer": 2, "n_head": 4, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 96, "d_kv": 16}
    return {k: small.get(k, v) for k, v in own.items() if k not in SMALL}


if __name__ == "__main__":
    sys.exit(main())

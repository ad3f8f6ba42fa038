"""Measure the examples of docs/libraries.md at real sizes: eager, Inductor and ours, interleaved in this process.

    python -m ci.bench.libraries [--size small] [--only timm,diffusers] [--seconds 6] --json docs/results/DATE-x86-libraries.json
    python -m ci.docs.tables                     # updates the page's table from the newest such record

It runs the page's own code blocks, for Inductor with its name in place of ours. A library that is not installed (extra `libraries`)
gets a row that says so. Rows have `fusewright bench`'s schema (`--show` prints them). At full size on two idle cores it should
take less than eight minutes, most of them for Inductor.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fusewright import machine
from fusewright.bench import child, report
from fusewright.bench.contenders import EAGER, KNOWN, Contender, from_backend
from fusewright.bench.load import OthersMeter
from fusewright.bench.stats import noise_verdict, paired_ratio, summarize
from fusewright.bench.steady import Lane, Row, Settings, run_rounds
from fusewright.bench.worker import WorkerError
from fusewright.report import recording

PAGE = Path(__file__).resolve().parents[2] / "docs/libraries.md"
IN_PLACE = "any module, in place: Accelerator().prepare(model), Trainer(model=model), pipeline.unet"
Call = Callable[[], Any]


def blocks() -> dict[str, str]:
    """Return the page's Python blocks, by the comment that each starts with."""
    return dict(re.findall(r"```python\n# ([^\n]+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


def run(title: str, backend: str = "fusewright", **names: Any) -> dict[str, Any]:
    """Run a block of the page with a backend's name in place of ours; return the names it defines."""
    found = {"torch": torch, **names}
    exec(compile(blocks()[title].replace('"fusewright"', repr(backend)), str(PAGE), "exec"), found)
    return found


@dataclass(frozen=True)
class Site:
    """The setting of a case: its size, the contender's backend (None: eager) and a folder for files."""

    full: bool
    backend: str | None
    folder: Path

    def pick(self, full: Any, small: Any) -> Any:
        return full if self.full else small

    def in_place(self, module: torch.nn.Module, title: str = IN_PLACE) -> torch.nn.Module:
        """Return the module after applying the page's line, or unchanged for eager."""
        if self.backend is not None:
            run(title, self.backend, model=module)
        return module


def _llama(site: Site) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    wide, layers, heads = site.pick((768, 8, 12), (32, 1, 2))
    config = LlamaConfig(
        vocab_size=site.pick(32000, 64), hidden_size=wide, intermediate_size=site.pick(2048, 64), num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def _generate(site: Site) -> Call:
    from transformers import CompileConfig

    model, ids = _llama(site), torch.arange(site.pick(32, 5))[None]
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    if site.backend is None:
        return lambda: model.generate(ids, disable_compile=True, **how)
    CompileConfig._compile_all_devices = True  # a field of each configuration; otherwise generate compiles only on GPUs
    found = run("transformers: generate", site.backend, model=model, ids=ids)
    found["config"]._compile_all_devices = True
    return lambda: model.generate(ids, compile_config=found["config"], **how)


def _bert(site: Site, **sizes: int) -> tuple[Any, Any]:
    """Build a BERT and a tokenizer for one-letter words."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = site.folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh"]))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=site.pick(30522, 13), **site.pick(sizes, small))
    return BertModel(config).eval(), BertTokenizerFast(str(vocabulary))


def _words(n: int) -> str:
    return " ".join("abcdefgh"[k % 8] for k in range(n))


def _pipeline(site: Site) -> Call:
    from transformers import pipeline

    model, tokenizer = _bert(site)
    pipe = pipeline("feature-extraction", model=site.in_place(model, "transformers: in place"), tokenizer=tokenizer, device="cpu")
    text = _words(site.pick(126, 6))
    return lambda: pipe(text)


def _trainer(site: Site) -> Call:
    from transformers import PrinterCallback, Trainer, TrainingArguments

    length = site.pick(64, 6)
    how = TrainingArguments(
        output_dir=str(site.folder), max_steps=4, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        logging_strategy="no", per_device_train_batch_size=4,
    )  # fmt: skip
    rows = [{"input_ids": (ids := torch.arange(k, k + length) % 60), "labels": ids} for k in range(16)]
    model = site.in_place(_llama(site), "transformers: in place")
    trainer = Trainer(model=model, args=how, train_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    return trainer.train


class _Net(torch.nn.Module):
    """A separate class, because torch does not compile `nn.Sequential` in place."""

    def __init__(self, wide: int, layers: int) -> None:
        super().__init__()
        parts = [(torch.nn.Linear(wide, wide), torch.nn.GELU(), torch.nn.LayerNorm(wide)) for _ in range(layers)]
        self.layers = torch.nn.Sequential(*(p for part in parts for p in part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def _net(site: Site) -> torch.nn.Module:
    return _Net(site.pick(1024, 16), site.pick(6, 1))


def _batches(site: Site) -> list[torch.Tensor]:
    return list(torch.randn(4, site.pick(256, 4), site.pick(1024, 16)))


def _accelerate(site: Site) -> Call:
    from accelerate import Accelerator

    accelerator, batches = Accelerator(cpu=True), _batches(site)
    model = site.in_place(_net(site))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))

    def step() -> None:
        for x in batches:
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            optimizer.step()

    return step


def _lightning(site: Site) -> Call:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def training_step(self, x: torch.Tensor, at: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(x).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    loader: Any = torch.utils.data.DataLoader(_batches(site), batch_size=None)  # type: ignore[arg-type]
    module: Any = Module(_net(site))
    if site.backend is not None:
        module = run("Lightning", site.backend, module=module)["compiled"]
    return lambda: lightning.Trainer(max_epochs=1, accelerator="cpu", devices=1, **quiet).fit(module, loader)


def _timm(name: str, site: Site) -> Call:
    import timm

    side = site.pick(224, 32)
    model = site.in_place(timm.create_model(name, **({"img_size": side} if "vit" in name else {})).eval())
    x = torch.randn(1, 3, side, side)
    return lambda: model(x)


def _sentences(site: Site) -> Call:
    from sentence_transformers import SentenceTransformer

    model, tokenizer = _bert(site, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)
    model.save_pretrained(site.folder)
    tokenizer.save_pretrained(site.folder)
    encoder = SentenceTransformer(str(site.folder), device="cpu")
    site.in_place(encoder[0])
    texts = [_words(site.pick(62, 5))] * site.pick(8, 2)
    return lambda: encoder.encode(texts, convert_to_tensor=True, show_progress_bar=False)


def _unet(site: Site) -> Call:
    from diffusers import UNet2DModel

    side = site.pick(32, 8)
    model = UNet2DModel(
        sample_size=side, block_out_channels=site.pick((128, 256, 256), (16, 32, 32)), layers_per_block=site.pick(2, 1),
        norm_num_groups=4, attention_head_dim=8, down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    unet, x, time = site.in_place(model.eval()), torch.randn(1, 3, side, side), torch.tensor(7)
    return lambda: unet(x, time).sample


def _graphs(site: Site) -> Call:
    from torch_geometric.nn import GCN

    nodes, features, edges = site.pick((2708, 1433, 10556), (9, 8, 27))
    model = site.in_place(GCN(features, 64, num_layers=2, out_channels=7).eval())
    x, links = torch.randn(nodes, features), torch.randint(0, nodes, (2, edges))
    return lambda: model(x, links)


def _torchao(site: Site) -> Call:
    wide = site.pick(1024, 64)
    layers = [torch.nn.Linear(wide, 4 * wide), torch.nn.GELU(), torch.nn.Linear(4 * wide, wide)]
    model, x = torch.nn.Sequential(*layers).eval(), torch.randn(1, wide)
    found = run("torchao", site.backend or "eager", model=model)
    compiled: Callable[..., Any] = found["compiled"] if site.backend else model
    return lambda: compiled(x)


@dataclass(frozen=True)
class Case:
    """A row: the page's example of a library, which needs `package`."""

    name: str
    package: str
    make: Callable[[Site], Call]
    train: bool = False


CASES = (
    Case("transformers: generate, 8 tokens", "transformers", _generate),
    Case("transformers: pipeline, BERT-base", "transformers", _pipeline),
    Case("transformers: Trainer, 4 steps", "accelerate", _trainer, train=True),
    Case("accelerate: 4 steps", "accelerate", _accelerate, train=True),
    Case("Lightning: fit, 4 steps", "lightning", _lightning, train=True),
    Case("timm: resnet50", "timm", functools.partial(_timm, "resnet50")),
    Case("timm: vit_small_patch16_224", "timm", functools.partial(_timm, "vit_small_patch16_224")),
    Case("sentence-transformers: MiniLM, 8 texts", "sentence_transformers", _sentences),
    Case("diffusers: UNet2DModel, 32x32", "diffusers", _unet),
    Case("torch geometric: GCN, Cora's size", "torch_geometric", _graphs),
    Case("torchao: int8 weights, an MLP of 1024", "torchao", _torchao),
)


class _Server(child.Server):
    """The measuring process's timing code, with calls made from a case."""

    def __init__(self, case: Case, full: bool, folder: Path) -> None:
        super().__init__()
        self.case, self.full, self.folder = case, full, folder

    def _compile(self, contender: Contender) -> Call:
        torch.manual_seed(0)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        return self.case.make(Site(self.full, contender.backend, folder))

    def _grad_mode(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(self.case.train)


class _Here:
    """A worker in this process."""

    def __init__(self, server: _Server) -> None:
        self._server = server

    def ask(self, do: str, timeout: float, **fields: Any) -> Row:
        try:
            answer: Row = getattr(self._server, do)(**fields)
        except Exception as e:  # any exception of a library or compiler counts as this contender's failure
            raise WorkerError(f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}", fatal=False) from e
        return answer


def measure(case: Case, contenders: Sequence[Contender], settings: Settings) -> Row:
    """Return a row of `fusewright bench`'s schema. `compile_s` and the first calls include building the case."""
    row: Row = {"model": case.name, "dtype": "fp32", "mode": "train" if case.train else "inference", "noise": "unknown"}
    if why := _missing(case.package):
        return {**row, "contenders": {c.name: {"status": "unavailable", "reason": why} for c in contenders}}
    torch.compiler.reset()
    found: dict[str, Row] = {}
    with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as folder:
        here = _Here(_Server(case, settings.size == "full", Path(folder)))
        lanes = list(_prepared(here, contenders, settings, found))
        if not any(lane.contender is EAGER for lane in lanes):
            return {**row, "contenders": found}
        run_rounds(lanes, settings, OthersMeter([]), found)
    summaries = {lane.contender.name: summarize(lane.blocks) for lane in lanes}
    for lane in lanes:
        mine = summaries[lane.contender.name]
        gained = paired_ratio(summaries[EAGER.name].rounds_ms, mine.rounds_ms)
        found[lane.contender.name] = {"status": "ok", "steady": mine.as_json(), "compile_s": lane.compile_s, "speedup": gained}
    firsts = {lane.contender.name: {"cold_s": lane.compile_s} for lane in lanes}
    noise = noise_verdict([s.spread for s in summaries.values()])
    return {**row, "contenders": {c.name: found[c.name] for c in contenders}, "noise": noise, "first_call": firsts}


def _prepared(here: _Here, contenders: Sequence[Contender], settings: Settings, failed: dict[str, Row]) -> Iterator[Lane]:
    """Yield the contenders that compile, ours last."""
    for contender in contenders:
        lane = Lane(contender, here, settings)  # type: ignore[arg-type]  # asked in the same way
        try:
            with recording() as graphs:
                lane.compile()
                lane.warm_up()
            if contender is contenders[-1] and not graphs:
                raise WorkerError("nothing was compiled: the library does not call the module that the page's line compiles", False)
        except WorkerError as e:
            failed[contender.name] = {"status": "failed", "reason": str(e)}
        else:
            yield lane


def _missing(package: str) -> str:
    """Return why a library cannot be used here, or ""."""
    try:
        importlib.import_module(package)
    except ImportError as e:
        return f"{e}: pip install '.[libraries]'"
    except RuntimeError as e:  # a torchvision for another torch
        return str(e).strip().partition("\n")[0]
    return ""


@contextlib.contextmanager
def _own_caches() -> Iterator[None]:
    """Use fresh cache folders, so that first calls find them empty."""
    with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as folder:
        names = ("FUSEWRIGHT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
        before = {n: os.environ.get(n) for n in names}
        os.environ.update({n: str(Path(folder) / n.lower()) for n in names})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def line(row: Mapping[str, Any]) -> str:
    """Format a row for the terminal."""
    found = row["contenders"]
    cells = [f"{n} {e['steady']['median_ms']:.3g} ms ({e['speedup']:.2f}x)" for n, e in found.items() if e["status"] == "ok"]
    cells += list(dict.fromkeys(f"{e['status']}: {e['reason']}" for e in found.values() if e["status"] != "ok"))
    return f"{row['model']}: {', '.join(cells)}; noise: {row['noise']}"


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)
    contenders = [EAGER, KNOWN["inductor"], from_backend(given.backend)]
    threads = machine.cores()
    torch.set_num_threads(threads)
    settings = Settings(given.size, threads=threads, seconds=given.seconds, warm_seconds=1.0, max_rounds=15)
    command = ["python", "-m", "ci.bench.libraries", *(sys.argv[1:] if argv is None else argv)]
    document = report.new_document(command, contenders[-1].name, asdict(settings))
    chosen = [c for c in CASES if not given.only or any(c.name.lower().startswith(n.lower()) for n in given.only.split(","))]
    with _own_caches():
        for case in chosen:
            report.put(document, row := measure(case, contenders, settings))
            print(line(row), flush=True)
            if given.json is not None:
                report.save(document, given.json)
    failed = [r for r in document["rows"] if any(e["status"] == "failed" for e in r["contenders"].values())]
    return 1 if failed or not chosen else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="full", choices=("full", "small"))
    parser.add_argument("--seconds", type=float, default=6.0, help="timing per row")
    parser.add_argument("--backend", default="fusewright")
    parser.add_argument("--only", default="", help="beginnings of rows' names, comma-separated")
    parser.add_argument("--json", type=Path, help="write the record here, row by row")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""`fusewright report`: one page about a model, from a real compile to its rendering in a browser."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from fusewright import registry
from fusewright.cli.app import app
from fusewright.report_page import document, page
from fusewright.report_page.document import Asked
from tests import accelerator

BACKEND = registry.best("cpu") or "fusewright_interp"
HOSTILE = "</script><script>document['title']='taken'</script><img src=x onerror=alert(1)>"
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.add_module(HOSTILE, nn.Linear(16, 16))

    def forward(self, x):
        return x + torch.tanh(self._modules[HOSTILE](self.norm(x)))

def build():
    return nn.Sequential(Block(), Block()).eval(), (torch.ones(4, 16),)
"""
CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; Debian: apt-get install chromium")


class Elements(HTMLParser):
    """Elements of a page with their attributes, and the text of its scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style", "title"):
            self.texts.append((self.found[-1][0], data))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("model") / "hostile.py"
    file.write_text(MODEL.replace("HOSTILE", repr(HOSTILE)))
    return document.collect(Asked(f"{file}:build", BACKEND, against_inductor=False))


def test_the_document_holds_every_part_of_the_page(found: dict[str, Any]) -> None:
    (graph,) = found["graphs"]
    assert {"eager", "ours"} == found["seconds"].keys() and all(s > 0 for s in found["seconds"].values())
    assert graph["nodes"] and all(n["seconds"] > 0 for n in graph["nodes"])
    assert "def run(args):" in graph["plan"]
    assert max(graph["memory"]["fresh"]) > 0 and graph["memory"]["weights"] >= 2 * (16 * 16 + 3 * 16) * 4
    assert not graph["not_judged"] and all(layer["passed"] for layer in graph["layers"])
    assert all(n["kernel"] in found["kernels"] for n in graph["nodes"] if n["kernel"])
    assert all(k["ir"] for k in found["kernels"].values())


def test_stages_lie_inside_of_the_first_call(found: dict[str, Any]) -> None:
    whole = found["first_call"]["seconds"]
    spans = found["first_call"]["spans"]
    assert {"Dynamo", "backend", "capture", "lower, infer", "plan, infer"} <= {s["name"] for s in spans}
    assert all(s["start"] >= 0 and s["start"] + s["seconds"] <= whole * 1.001 for s in spans)


def test_arrows_go_down_and_boxes_of_a_row_stand_apart(found: dict[str, Any]) -> None:
    nodes = {n["at"]: n for n in found["graphs"][0]["nodes"]}
    assert all(nodes[i]["row"] < n["row"] for n in nodes.values() for i in n["inputs"])
    places = sorted((n["row"], n["column"]) for n in nodes.values())
    assert all(a[0] < b[0] or b[1] - a[1] >= 0.99 for a, b in itertools.pairwise(places))


def test_eager_stands_on_the_lines_that_our_kernels_cover(found: dict[str, Any]) -> None:
    (chart,) = found["bars"]
    lines = {line: g for g in chart["groups"] for line in g["lines"]}
    assert set(chart["code"]) == set(lines)
    norm = next(line for line, text in chart["code"].items() if "F.layer_norm" in text or "self.norm" in text)
    assert lines[norm]["seconds"]["ours"] > 0 and lines[norm]["seconds"]["eager"] > 0


def test_modules_are_named_by_their_path(found: dict[str, Any]) -> None:
    modules = {n["module"] for n in found["graphs"][0]["nodes"]}
    assert any("1" in m and HOSTILE[:9] in m for m in modules) or any(HOSTILE[:9] in m for m in modules)


def test_hostile_names_stay_text(found: dict[str, Any]) -> None:
    text = page.render({**found, "model": HOSTILE})
    elements = Elements()
    elements.feed(text)
    assert [a.get("type") for t, a in elements.found if t == "script"] == ["application/json", None]
    assert not [t for t, _ in elements.found if t in ("img", "iframe", "link", "object")]
    assert HOSTILE in json.loads(next(d for t, d in elements.texts if t == "script"))["model"]


def test_the_page_needs_nothing_else_and_allows_no_other_script(found: dict[str, Any]) -> None:
    text = page.render(found)
    elements = Elements()
    elements.feed(text)
    policy = next(a["content"] for t, a in elements.found if a.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")
    for kind, body in (("style", page._part("page.css")), ("script", page._part("page.js"))):
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy and body in text
    assert not [a for _, a in elements.found if "src" in a or "href" in a]
    addresses = set(re.findall(r"https?://[^\s\"']+", page._part("page.js") + page._part("page.html")))
    assert addresses == {"http://www.w3.org/2000/svg"}, "the name of SVG, which nobody fetches"
    assert "innerHTML" not in text.partition('id="data"')[0] + page._part("page.js")


def test_what_json_cannot_say_becomes_null() -> None:
    assert json.loads(page.as_text({"a": float("nan"), "b": [float("inf"), 1.0], "c": "<&>\u2028"})) == {
        "a": None, "b": [None, 1.0], "c": "<&>\u2028",
    }  # fmt: skip


def test_training_has_a_graph_for_each_direction(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the models of the suite need transformers: pip install 'fusewright[bench]'")
    trained = document.collect(Asked("bert_small", BACKEND, size="small", train=True, against_inductor=False))
    assert [g["phase"] for g in trained["graphs"]] == ["forward", "backward"]
    assert [c["phase"] for c in trained["bars"]] == ["forward", "backward"]
    assert all(g["not_judged"] for g in trained["graphs"])


def test_a_page_of_another_device_has_its_times_and_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MODEL.replace("HOSTILE", repr("inner")))
    told = accelerator.pretend(monkeypatch)
    made = document.collect(Asked(f"{tmp_path / 'm.py'}:build", "fusewright_null", against_inductor=False, device="meta"))
    (graph,), (chart,) = made["graphs"], made["bars"]
    assert made["device"] == "meta" and made["environment"]["device"] == accelerator.NAME
    assert {n["seconds"] for n in graph["nodes"]} == {0.0}, "the device's own events, less what they take themselves"
    assert chart["who"] == ["ours", "eager"] and graph["not_judged"] and "device 0" in told
    assert accelerator.NAME in page.render(made)


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_of_decoding_is_one_graph_held_to_fp64(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the models of the suite need transformers: pip install 'fusewright[bench]'")
    file = tmp_path / "page.html"
    options = ("--backend", BACKEND, "--device", "cpu", "--dtype", "bf16", "--size", "small", "--no-inductor")
    done = CliRunner().invoke(app, ["report", "decode:llama", *options, "-o", str(file), "--json", str(tmp_path / "page.json")])
    assert done.exit_code == 0, done.output
    made = json.loads((tmp_path / "page.json").read_text())
    (graph,) = made["graphs"]
    assert not graph["not_judged"] and graph["layers"] and made["seconds"]["ours"] > 0
    _says_no_folder(file.read_text())


def test_a_page_says_nothing_of_the_folders_it_was_made_in(found: dict[str, Any]) -> None:
    assert found["model"] == "hostile.py:build"
    _says_no_folder(page.render(found))


def _says_no_folder(text: str) -> None:
    """Check that no local folder is named, since pages are shared."""
    folders = {Path(f).parent for f in (torch.__file__, sys.executable, document.__file__, tempfile.gettempdir() + "/x")}
    assert not [f for f in (*map(str, folders), str(Path.home()) + "/") if f in text]


def test_the_command_says_at_once_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text("def build():\n    raise AssertionError('never built')\n")
    command = ["report", f"{tmp_path / 'm.py'}:build", "-o", str(tmp_path / "no" / "r.html")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and "there is no folder" in result.output


def _browse(file: Path, folder: Path, *options: str) -> str:
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars",
        f"--user-data-dir={folder}", "--virtual-time-budget=5000", *options, file.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def _corner(png: bytes) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the size of a picture and the RGB of its first pixel, which PNG filters do not change."""
    at, data = 8, b""
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        data += png[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        at += 12 + length
    size: tuple[int, int] = struct.unpack(">II", png[16:24])
    return size, tuple(zlib.decompress(data)[1:4])


@needs_browser
def test_a_browser_draws_every_part(found: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page.render({**found, "model": HOSTILE}))
    dom = _browse(file, tmp_path / "profile", "--dump-dom")
    assert 'data-ready="yes"' in dom, "the script ended before its last part"
    assert "<title>taken" not in dom and "<img" not in dom
    body = dom.partition("<body>")[2].partition('<script id="data"')[0]
    assert body.count('class="node"') == len(found["graphs"][0]["nodes"])
    for part in ("cards", "barchart", "graph", "fatetable", "flame", "memchart", "layerchart", "plantext", "envtable"):
        inside = body.partition(f'id="{part}"')[2].partition(">")[2]
        assert not inside.startswith(("</div>", "</svg>")), f"{part} is empty"


@needs_browser
@pytest.mark.parametrize("width", [1280, 420])
def test_the_page_is_light_or_dark_as_the_reader_has_it(found: dict[str, Any], tmp_path: Path, width: int) -> None:
    file = tmp_path / "page.html"
    file.write_text(page.render(found))
    corners = []
    for scheme in ("1", "0"):  # Blink's values for light and dark
        picture = tmp_path / f"{scheme}.png"
        sized = f"--window-size={width},900"
        _browse(file, tmp_path / scheme, sized, f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={picture}")
        size, color = _corner(picture.read_bytes())
        assert size == (width, 900)
        corners.append(sum(color) / 3)
    assert corners[0] > 200 and corners[1] < 60

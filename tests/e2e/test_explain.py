"""`fusewright explain` shows what a real compilation did."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from fusewright.cli.app import app
from fusewright.graph.parser import parse

MODEL = '''
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        y = torch.linalg.inv(x).relu()
        torch._dynamo.graph_break()
        return self.head(y).softmax(-1)

def net():
    return Net(), (torch.eye(8),)

def wrong():
    return 3

class Recurrent(Net):
    def forward(self, x):
        for _ in range(2):  # Dynamo resumes no loops: torch 2.15 breaks in front of a GRU
            x = torch.cat((self.gru(self.head(x))[0], x[:, 4:]), -1)
        return x

def layers():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), (torch.eye(8),)

def recurrent():
    net = Recurrent()
    net.gru = torch.nn.GRU(4, 4)
    return net, (torch.eye(8),)
'''  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(MODEL)
    return str(tmp_path / "net.py")


def explain(*args: str) -> Result:
    return CliRunner().invoke(app, ["explain", *args])


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_page(file: str) -> None:
    result = explain(f"{file}:net", "--backend", "fusewright_interp")
    assert result.exit_code == 0, result.output
    for text in (
        "by fusewright_interp",
        "2 graphs, 1 graph break, 0 recompiles",
        "aten.linalg_inv_ex.default",
        "no_lowering: not in the opset",
        "net.py:10",  # where the inverse is called
        "softmax",
        "linear.",  # a rule that was hit
        "stages: canonicalize",
        "direct",
    ):
        assert text in result.output


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_function_that_dynamo_gives_back_is_named_with_the_reason_and_a_hint(file: str) -> None:
    result = explain(f"{file}:recurrent", "--backend", "fusewright_null")
    assert "Dynamo gave 1 function back to Python whole" in result.output
    assert "RNN, GRU, or LSTM" in result.output and re.search("Hint: .|allow_rnn=True", result.output)  # 2.15: in the reason


@pytest.mark.usefixtures("fresh_dynamo")
def test_json(file: str) -> None:
    document = json.loads(explain(f"{file}:net", "--backend", "fusewright_null", "--json").output)
    assert document["backend"] == "fusewright_null"
    assert document["coverage"] == {"ops": 0.0, "time": 0.0, "carried_ops": 0.0, "carried_time": 0.0}
    assert [g["phase"] for g in document["graphs"]] == ["infer", "infer"]
    found = {g["op"]: g for g in document["fallbacks"]}
    assert found["linear"]["n"] == 1 and found["linear"]["sources"] == ["net.py:12"]
    assert found["linear"]["shapes"] == ["float32[8, 4]"]


@pytest.mark.usefixtures("fresh_dynamo")
def test_an_op_that_no_line_of_the_users_made_has_its_module(file: str) -> None:
    document = json.loads(explain(f"{file}:layers", "--backend", "fusewright_null", "--json").output)
    assert {g["op"]: g["sources"] for g in document["fallbacks"]} == {"linear": ["module 0"], "gelu": ["module 1"]}


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_graphs_and_the_plan_are_text(file: str) -> None:
    output = explain(f"{file}:net", "--backend", "fusewright_null", "--ir", "simplify", "--plan").output
    first, plan, second, _ = output.split("# graph ")[1:]
    assert "linalg_inv_ex" in first and "linear(" in second
    assert "def run(args):" in plan and "torch" not in first
    parse("".join(second.splitlines(keepends=True)[1:]))


@pytest.mark.usefixtures("fresh_dynamo")
def test_training_shows_both_graphs() -> None:
    document = json.loads(
        explain("bert_small", "--train", "--size", "small", "--backend", "fusewright_null", "--json").output
    )
    assert sorted({g["phase"] for g in document["graphs"]}) == ["backward", "forward"]
    assert document["recompiles"] == 0


@pytest.mark.usefixtures("fresh_dynamo")
def test_options_and_what_they_cost_in_accuracy(file: str) -> None:
    given = ["--backend", "graviton_acl", "--option", "simulate=1", "--option", "target=neoverse-v1", "--accuracy"]
    document = json.loads(explain(f"{file}:net", *given, "--json").output)
    assert document["accuracy"]["passed"] and document["accuracy"]["err_max"] < 1e-5
    torch.compiler.reset()
    assert "error against fp64: largest" in explain(f"{file}:net", *given).output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["bert", "--backend", "fusewright_null", "--option", "tile=8"], "'tile=8' is no option"),
        (["brt"], "bert"),
        (["bert", "--backend", "x86_onedn"], "x86_onednn"),
        (["nofile.py:net"], "there is no file"),
        (["nofile.py"], "there is no file 'nofile.py'; a model of your own is file.py:function"),
        (["C:\\models\\nofile.py"], "there is no file 'C:"),
        (["../models"], ". A model of your own is file.py:function"),
        (["bert", "--train"], "bert_small"),
    ],
)
def test_wrong_names_get_the_nearest(args: list[str], message: str) -> None:
    result = explain(*args)
    assert result.exit_code != 0
    assert message in str(result.exception)


def test_a_file_alone_gets_the_names_of_its_functions(file: str) -> None:
    said = str(explain(file).exception)
    assert f"name its function too, {file}:net (it has net, wrong, layers, recurrent)" in said


def test_a_function_that_builds_nothing(file: str) -> None:
    assert "must return (module or function, args)" in str(explain(f"{file}:wrong").exception)

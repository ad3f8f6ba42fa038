"""Models in a file, named as by users: `toy_models.py:mlp`."""

import os

import torch


def mlp():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    return module.eval(), (torch.randn(4, 16),)


def function():
    return (
        lambda x, *, scale: {"y": x * scale, "z": (x + 1, None)},
        torch.ones(3),
        {"scale": torch.tensor(2.0)},
    )


def broken():
    def fail(x):
        raise RuntimeError("shapes do not fit")

    return fail, (torch.ones(2),)


def crashes_when_compiled():
    def crash(x):
        if torch.compiler.is_compiling():
            os._exit(7)
        return x + 1

    return crash, (torch.ones(2),)


def wrong_when_compiled():
    return lambda x: x + 1.5 if torch.compiler.is_compiling() else x + 1, (torch.ones(2),)


def not_a_model():
    return "bert"


NUMBER = 3

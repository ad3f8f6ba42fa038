"""ONNX Runtime as a contender: a module exported by torch, run by the CPU provider. Needs `fusewright[onnxruntime]`."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch


def compile(fn: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """`fn`, a module, exported for its first call's arguments and run by ONNX Runtime from then on.

    Threads sleep between ops, as other contenders' do, unless the option `spinning` is true. Results are a list of tensors.
    """
    if not isinstance(fn, torch.nn.Module):
        raise TypeError(f"ONNX Runtime runs exported modules; {type(fn).__name__} is none")
    session: list[_Session] = []

    def call(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        if not session:
            session.append(_Session(fn, args, kwargs, **options))
        return session[0](args, kwargs)

    return call


class _Session:
    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spinning: bool = False) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = torch.get_num_threads()
        settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(spinning)))
        logging.getLogger("onnxscript").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(module, args, kwargs=kwargs, dynamo=True, verbose=False)
        assert program is not None
        model = program.model_proto.SerializeToString()
        self._session = onnxruntime.InferenceSession(model, settings, providers=["CPUExecutionProvider"])
        self._inputs = [given.name for given in self._session.get_inputs()]
        self._order = list(inspect.signature(module.forward).parameters)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        given = {**dict(zip(self._order, args, strict=False)), **kwargs}
        # Numbers and switches are part of the exported graph.
        tensors = [value.numpy() for value in given.values() if isinstance(value, torch.Tensor)]
        results = self._session.run(None, dict(zip(self._inputs, tensors, strict=True)))
        return [torch.from_numpy(result) for result in results]

"""FakeTensors and other tensors without memory of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def is_fake(t: object) -> bool:
    """Whether `t` is a FakeTensor: metadata without storage."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(t, FakeTensor)


def fake_mode_of(t: Any) -> Any:
    """The FakeTensorMode of a FakeTensor; running ops under it propagates metadata."""
    return t.fake_mode


def fake_mode(shape_env: Any = None) -> Any:
    """A new FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)


def symbolic_mode() -> Any:
    """A FakeTensorMode whose `from_tensor` makes sizes symbolic."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return fake_mode(ShapeEnv())


def fake_tensor(
    mode: Any, shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype, device: str
) -> torch.Tensor:
    """A FakeTensor of any device type, even one that this torch build does not support."""
    from torch._subclasses.fake_tensor import FakeTensor

    storage = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device="meta")
    fake: torch.Tensor = FakeTensor(mode, storage, torch.device(device))
    return fake


def real_tensors() -> Any:
    """A context manager in which ops really compute, since AOTAutograd compiles inside a FakeTensorMode."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def lazy_view(fake: Any, kind: str) -> torch.Tensor:
    """A lazily negated ("neg") or conjugated ("conj") view of a FakeTensor."""
    views = {"neg": torch.ops.aten._neg_view.default, "conj": torch.ops.aten._conj.default}
    with fake_mode_of(fake):
        return views[kind](fake)


def is_wrapper(t: object) -> bool:
    """Whether a tensor's subclass wraps other tensors, which AOTAutograd unwraps."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return is_traceable_wrapper_subclass(t)


def is_zero_tensor(t: torch.Tensor) -> bool:
    """Whether a tensor is zeros without memory, as autograd's formulas create."""
    return t._is_zerotensor()

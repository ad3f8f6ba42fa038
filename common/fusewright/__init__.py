"""Fusewright: a family of torch.compile backends on one shared lowering interface."""

__version__ = "0.1.0"

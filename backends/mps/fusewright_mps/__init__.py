"""Fusewright backend `apple_mps`: Metal kernels and MPS library calls."""

from fusewright.dynamo import entry

apple_mps = entry("apple_mps")

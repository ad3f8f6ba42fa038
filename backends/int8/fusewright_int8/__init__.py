"""Fusewright backend `x86_int8`: int8 quantization engine for x86-64."""

from fusewright.dynamo import entry

x86_int8 = entry("x86_int8")

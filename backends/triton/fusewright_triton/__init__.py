"""Fusewright backends `nvidia_triton` and `rocm_triton`: one Triton emitter, two vendors."""

from fusewright.dynamo import entry

nvidia_triton = entry("nvidia_triton")
rocm_triton = entry("rocm_triton")

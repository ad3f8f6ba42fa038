"""Kernels that are written by hand, where a loop kernel cannot be as good: one file of Triton source each."""

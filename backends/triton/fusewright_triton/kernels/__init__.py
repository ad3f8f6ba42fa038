"""Handwritten kernels, for computations that a loop kernel cannot do as well: one file of Triton source each."""

"""Handwritten kernels, for computations that loop kernels do not express."""

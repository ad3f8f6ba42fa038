"""Kernels written by hand, for what loop kernels do not express."""

"""Kernels written by hand for Arm."""

"""Handwritten Metal kernels, launched, compiled and cached like loop kernels."""

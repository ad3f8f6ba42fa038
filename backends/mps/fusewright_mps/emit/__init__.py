"""Emission of loop kernels as Metal Shading Language."""

"""Hundreds of models in small geometries, each judged in a process of its own: `python -m tests.zoo`."""

"""Hundreds of models at small geometry, each judged in a process of its own: `python -m tests.zoo`."""

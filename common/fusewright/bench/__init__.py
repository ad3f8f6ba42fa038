"""Benchmarks: the suite of models, timing beside other compilers, and accuracy against fp64.

The library proper imports nothing from here; only the code that uses `transformers`, `rich` and `click` requires them.
"""

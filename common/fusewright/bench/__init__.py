"""Measuring: the suite of models, honest timing beside other compilers and accuracy against fp64.

Nothing here is imported by the library proper; `transformers`, `rich` and `click` are needed only by what
uses them.
"""

"""Symbolic sizes as values: `expr` is the type, `functions` what polynomials do not cover, `traced` converts torch's, `serial`
reads and writes JSON."""

"""Symbolic sizes as values: `expr` is the type, `functions` what polynomials do not cover, `traced` makes them of torch's,
`serial` writes and reads them."""

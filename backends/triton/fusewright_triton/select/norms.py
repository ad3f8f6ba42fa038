"""Batch norms of inference that no convolution takes."""

from __future__ import annotations

from fusewright.toolkit.region.norms import of_constants, write_batch_norm
from fusewright.toolkit.region.pattern import chain
from fusewright.toolkit.region.rewrite import Row

ROWS = (
    Row(
        "triton.batch_norm", chain("batch_norm"), when=lambda m, c: of_constants(m.anchor, c.b),
        write=lambda m, c: write_batch_norm(m.anchor, c.b), note="batch norm of constants",
    ),
)  # fmt: skip

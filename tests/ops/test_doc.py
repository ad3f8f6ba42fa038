"""docs/ops.md matches the table."""

from __future__ import annotations

from ci.docs.ops import PAGE, page


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m ci.docs.ops"

"""docs/ops.md is what the table says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "ci/gen_ops_doc.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

#!/usr/bin/env bash
# Job "host": everything that needs no device. It also decides whether a change may land.
set -euo pipefail
PYTHON=${PYTHON:-python}
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy
"$PYTHON" -m ci.check_tree
"$PYTHON" -m pytest -n 2 --dist worksteal -q tests </dev/null

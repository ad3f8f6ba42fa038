#!/usr/bin/env bash
# A vendor's job, on that vendor's hardware: the doctor must find the device and compute on it, then its tests run.
# Usage: ci/backend.sh NAME   (a name of fusewright.backends)
set -euo pipefail
name=$1
PYTHON=${PYTHON:-python}
"$PYTHON" -m fusewright doctor --json | "$PYTHON" -m ci.require_backend "$name"
tests=(tests/backends)
[ -d "tests/backends/$name" ] && tests=("tests/backends/$name")
"$PYTHON" -m pytest -q "${tests[@]}" </dev/null

#!/usr/bin/env bash
# A vendor's job on that vendor's hardware: the doctor must find the device and compute on it; then its tests run, and a part of
# each level of the conformance kit (`fusewright conformance --backend NAME` runs all of it). Its record goes to $OUT, if set.
# Usage: ci/backend.sh NAME   (a name of fusewright.backends)
set -euo pipefail
name=$1
PYTHON=${PYTHON:-python}
"$PYTHON" -m fusewright doctor --json | "$PYTHON" -m ci.require_backend "$name"
tests=(tests/backends)
[ -d "tests/backends/$name" ] && tests=("tests/backends/$name")
"$PYTHON" -m pytest -q "${tests[@]}" </dev/null
"$PYTHON" -m fusewright conformance --backend "$name" --part 8 --jobs 2 ${OUT:+--json "$OUT/$name-conformance.json"}

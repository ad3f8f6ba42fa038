#!/usr/bin/env bash
# A GPU backend's job on a machine without that GPU: run its own code on CPU tensors, and build every kernel of the suite as machine
# code for the backend's targets. A part of each level of the conformance kit runs too; its record goes to $OUT, if set.
# Usage: ci/simulated.sh NAME   (nvidia_triton or rocm_triton)
set -euo pipefail
name=$1
PYTHON=${PYTHON:-python}
"$PYTHON" -m fusewright doctor --json | "$PYTHON" -m ci.require_backend "$name" --simulated
"$PYTHON" -m pytest -n 2 --dist worksteal -q tests/backends/triton </dev/null
"$PYTHON" -m fusewright conformance --backend "$name" --simulate --part 8 --jobs 2 ${OUT:+--json "$OUT/$name-conformance.json"}
"$PYTHON" -m ci.operators.opinfo --backend "$name" --simulate --samples 1 --shard 1/4
"$PYTHON" -m ci.gpu.build_kernels --backend "$name"

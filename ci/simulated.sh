#!/usr/bin/env bash
# A GPU backend's job on a machine without that GPU: its own code on CPU tensors, and every kernel of the suite as machine
# code for the backend's targets.
# Usage: ci/simulated.sh NAME   (nvidia_triton or rocm_triton)
set -euo pipefail
name=$1
PYTHON=${PYTHON:-python}
"$PYTHON" -m fusewright doctor --json | "$PYTHON" -m ci.require_backend "$name" --simulated
"$PYTHON" -m pytest -n 2 -q tests/backends/triton </dev/null
"$PYTHON" -m ci.operators.opinfo --backend "$name" --simulate --samples 1 --shard 1/4
"$PYTHON" -m ci.gpu.build_kernels --backend "$name"

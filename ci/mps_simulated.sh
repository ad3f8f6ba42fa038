#!/usr/bin/env bash
# The Mac's backend without a Mac: its tests, every model of the suite, its fusion compared with Triton's, and a dry run of the
# Mac's own job. It needs a C++ compiler.
# Usage: ci/mps_simulated.sh apple_mps
set -euo pipefail
name=$1
PYTHON=${PYTHON:-python}
"$PYTHON" -m pytest -n 2 --dist worksteal -q tests/backends/mps </dev/null
"$PYTHON" -m ci.mps.models
"$PYTHON" -m ci.mps.fusion --train bert_small,resnet18
"$PYTHON" -m ci.mps.operators
"$PYTHON" -m ci.mps.kernels --shard 1/4
"$PYTHON" -m ci.operators.opinfo --backend "$name" --simulate --samples 1 --dtypes float32,float16,bfloat16 --shard 1/8
ci/mps.sh "$name" --simulate

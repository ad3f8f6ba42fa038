#!/usr/bin/env bash
# Install torch and every package of the checkout, with test dependencies, into the environment of $PYTHON.
# Usage: ci/setup.sh VERSION [EXTRAS]   VERSION of torch, or "newest"; EXTRAS of the workspace (default: test,lint)
# The runner decides which build of torch it is (CPU, CUDA, ROCm): its pip names the index (PIP_INDEX_URL).
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1
extras=${2:-test,lint}
PYTHON=${PYTHON:-python}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -v '^torch==' ci/constraints.txt >"$constraints"
if [ "$version" = newest ]; then
  "$PYTHON" -m pip install -q --upgrade torch
else
  "$PYTHON" -m pip install -q "torch==$version"
fi
# The version as the index names it: in a CUDA build, `torch.__version__` has a local part that the wheel's version lacks.
"$PYTHON" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >>"$constraints"
"$PYTHON" -m pip install -q -c "$constraints" ".[$extras]"
# A CUDA build of torch brings its own Triton; the others need one to simulate the GPU backends.
if [ "$(uname -s)" = Linux ] && ! "$PYTHON" -c 'import triton' 2>/dev/null; then
  "$PYTHON" -m pip install -q -c "$constraints" './backends/triton[simulate]'
fi
"$PYTHON" -m pip check

#!/usr/bin/env bash
# The example backend on XLA (examples/xla_cpu): install JAX into an environment on top of this one, then run doctor, the package's
# tests, BERT and ResNet against fp64, and the conformance kit. Usage: ci/xla_cpu.sh [FOLDER OF THE ENVIRONMENT]
set -euo pipefail
PYTHON=${PYTHON:-python}
venv=${1:-build/xla}
export PYTHONPATH="$PWD/common${PYTHONPATH:+:$PYTHONPATH}"
if [ ! -x "$venv/bin/python" ]; then
  "$PYTHON" -m venv --system-site-packages "$venv"
  # If this is a virtual environment, system packages would not include its own, so it is named too.
  "$PYTHON" - >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/beneath.pth" <<'EOF'
import site
print("import site;", "; ".join(f"site.addsitedir({folder!r})" for folder in site.getsitepackages()))
EOF
fi
"$venv/bin/python" -m pip install -q "jax>=0.8,<0.12"
"$venv/bin/python" -m pip install -q --no-deps --no-build-isolation ./examples/xla_cpu
report=$("$venv/bin/python" -m fusewright doctor --json) || true # it fails for any backend that is broken; only this one counts
"$venv/bin/python" ci/require_backend.py xla_cpu <<<"$report"
"$venv/bin/python" -m pytest -q examples/xla_cpu/tests
"$venv/bin/python" -m ci.xla_models
"$venv/bin/python" -m fusewright conformance --backend xla_cpu --level C0..C3

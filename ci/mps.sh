#!/usr/bin/env bash
# The Mac's job: the doctor must find the device and compute on it; then ops and models are checked and timed, and recorded.
# Usage: ci/mps.sh apple_mps [OPTIONS OF ci/mps/check.py]   The record goes to $OUT/mps.json, or to mps.json here.
# With --simulate it needs no Mac: the same checks on CPU tensors with the Metal shim, without times.
set -euo pipefail
name=$1
shift
PYTHON=${PYTHON:-python}
simulated=()
case " $* " in *" --simulate "*) export FUSEWRIGHT_SIMULATE=1 && simulated=(--simulated) ;; esac
report=$("$PYTHON" -m fusewright doctor --json) || true # it fails for any backend that is broken; only this one counts here
"$PYTHON" -m ci.require_backend "$name" ${simulated[@]+"${simulated[@]}"} <<<"$report"
"$PYTHON" -m ci.mps.check --json "${OUT:-.}/mps.json" "$@"

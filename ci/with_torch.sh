#!/usr/bin/env bash
# Run tests with another version of torch, in a separate environment. Usage: ci/with_torch.sh VERSION [ARGUMENTS OF PYTEST]
# The quick tests by default; all of two folders: ci/with_torch.sh 2.12.1 -q tests/ops tests/unit
# `python -m ci.jobs cells` lists the supported versions. An environment with a CUDA build takes 8 GB, and is removed afterwards.
set -euo pipefail
version=$1
shift
cd "$(dirname "$0")/.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
PYTHON="$venv/bin/python" ci/setup.sh "$version" test
[ $# -gt 0 ] || set -- -n 2 -q -m "not slow" tests/unit tests/backends
"$venv/bin/python" -m pytest "$@" </dev/null

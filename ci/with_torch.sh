#!/usr/bin/env bash
# The quick tests with another version of torch, in an environment of its own. Usage: ci/with_torch.sh 2.12.0
# `python -m ci.jobs cells` lists the versions that are supported.
set -euo pipefail
version=$1
cd "$(dirname "$0")/.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install -q "torch==$version"
"$venv/bin/pip" install -q '.[test]' "torch==$version"
"$venv/bin/python" -m pytest -n 2 -q -m "not slow" tests/unit tests/backends </dev/null

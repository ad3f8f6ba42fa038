#!/usr/bin/env bash
# Kernels for AArch64, made here, linked and run under QEMU on a Debian or Ubuntu machine of another kind: an arm64 Python, C
# library and llvmlite are unpacked into a folder, nothing is installed. Usage: ci/aarch64_link.sh [FOLDER]
# Where apt-get or dpkg-deb is missing this fails; on AArch64 `python ci/aarch64_link.py` does it without an emulator.
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python}
if [ $# -gt 0 ]; then folder=$1; mkdir -p "$folder"; else folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT; fi
folder=$(cd "$folder" && pwd)
mkdir -p "$folder"/apt/{lists/partial,cache/archives/partial} "$folder"/{debs,host,root,site,code}
touch "$folder/apt/status"
cat > "$folder/apt.conf" <<EOF
APT::Architecture "arm64"; APT::Architectures {"arm64";}; APT::Sandbox::User "root";
Dir::State "$folder/apt"; Dir::State::lists "$folder/apt/lists"; Dir::State::status "$folder/apt/status";
Dir::Cache "$folder/apt/cache";
EOF

emulator=$(command -v qemu-aarch64-static || true)
if [ -z "$emulator" ]; then
  (cd "$folder/host" && apt-get download -qq qemu-user-static && dpkg-deb -x qemu-user-static_*.deb .)
  emulator=$folder/host/usr/bin/qemu-aarch64-static
fi
if [ ! -x "$folder/root/usr/bin/python3.11" ]; then
  export APT_CONFIG=$folder/apt.conf
  apt-get update -qq
  (cd "$folder/debs" && apt-get download -qq libc6 libgcc-s1 libstdc++6 zlib1g libffi8 libexpat1 libuuid1 libbz2-1.0 \
    liblzma5 libpython3.11-minimal libpython3.11-stdlib python3.11-minimal)
  unset APT_CONFIG
  for package in "$folder"/debs/*.deb; do dpkg-deb -x "$package" "$folder/root"; done
fi
if [ ! -d "$folder/site/llvmlite" ]; then
  version=$("$PYTHON" -c 'import llvmlite; print(llvmlite.__version__)')
  "$PYTHON" -m pip install -q --target "$folder/site" --no-deps --only-binary=:all: --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 "llvmlite==$version"
fi
"$PYTHON" "$repository/ci/aarch64_link.py" make "$folder/code"
PYTHONPATH=$folder/site "$emulator" -cpu max -L "$folder/root" "$folder/root/usr/bin/python3.11" \
  "$repository/ci/aarch64_link.py" run "$folder/code"

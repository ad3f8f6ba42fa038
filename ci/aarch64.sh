#!/usr/bin/env bash
# Run the backend `graviton_acl` on a Debian or Ubuntu machine of another architecture: an arm64 Python 3.11 and C library, torch's
# aarch64 wheel with its Arm Compute Library, and QEMU's user-mode emulator are unpacked into a folder; nothing is installed.
#
#   ci/aarch64.sh [PYTEST_ARG...] the tests of the job `graviton_acl_emulated`; with `-m slow`, those that it leaves out
#   ci/aarch64.sh fetch           only unpack what is missing, which enables the tests that use an emulated Python
#   ci/aarch64.sh python ARG...   the emulated Python, with the packages of this checkout
#
# AARCH64_ROOT  the folder, kept between runs (default: fusewright/aarch64 in the user's cache)
# AARCH64_CPU   the emulated core (default: 256-bit vectors, as in Graviton3; `neoverse-n1` has no SVE)
set -euo pipefail
repository=$(cd "$(dirname "$0")/.." && pwd)
export PYTHON=${PYTHON:-python}
case "${1:-test}" in fetch | python) what=$1 ;; *) what=test ;; esac
[ "$what" = test ] && [ "${1:-}" != graviton_acl ] || shift
root=${AARCH64_ROOT:-${XDG_CACHE_HOME:-$HOME/.cache}/fusewright/aarch64}
TORCH=2.10.0 # later ones are CUDA builds
DEBS="libc6 libgcc-s1 libstdc++6 libgomp1 zlib1g libffi8 libexpat1 libuuid1 libbz2-1.0 liblzma5 libssl3 libsqlite3-0
  libpython3.11-minimal libpython3.11-stdlib python3.11-minimal"
WHEELS="numpy llvmlite sympy networkx jinja2 fsspec filelock typing_extensions platformdirs click rich pytest pytest-xdist
  hypothesis expecttest transformers"
PLATFORMS="--platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64
  --platform manylinux2014_aarch64"

# Without the emulator or its files, tests are skipped and counted; other commands fail.
missing() {
  printf 'aarch64: %s\n' "$1" >&2
  [ "$what" = test ] || exit 3
  (cd "$repository" && "$PYTHON" -m ci.aarch64.job skipped "$1")
  exit 0
}

fetch_emulator() {
  emulator=$(command -v qemu-aarch64-static || true)
  [ -n "$emulator" ] && return
  emulator=$root/host/usr/bin/qemu-aarch64-static
  [ -x "$emulator" ] && return
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || missing "neither qemu-aarch64-static nor apt-get is here"
  mkdir -p "$root/host"
  (cd "$root/host" && apt-get download -qq qemu-user-static) || missing "the package qemu-user-static cannot be fetched"
  dpkg-deb -x "$root"/host/qemu-user-static_*.deb "$root/host"
  rm -f "$root"/host/*.deb
}

fetch_system() {
  [ "$(cat "$root/system.stamp" 2>/dev/null)" = "$DEBS" ] && return
  command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || missing "apt-get is not here"
  local apt=$root/apt
  rm -rf "$root/system" "$apt" && mkdir -p "$root/system" "$apt"/{lists/partial,cache/archives/partial,debs}
  touch "$apt/status"
  cat >"$apt/conf" <<CONF
APT::Architecture "arm64"; APT::Architectures {"arm64";}; APT::Sandbox::User "root";
Dir::State "$apt"; Dir::State::lists "$apt/lists"; Dir::State::status "$apt/status"; Dir::Cache "$apt/cache";
CONF
  APT_CONFIG=$apt/conf apt-get update -qq || missing "the package lists of arm64 cannot be fetched"
  # shellcheck disable=SC2086
  (cd "$apt/debs" && APT_CONFIG=$apt/conf apt-get download -qq $DEBS) || missing "a package of arm64 cannot be fetched"
  for package in "$apt"/debs/*.deb; do dpkg-deb -x "$package" "$root/system"; done
  rm -rf "$apt"
  printf %s "$DEBS" >"$root/system.stamp"
}

fetch_wheels() {
  local numpy llvmlite stamp
  numpy=$("$PYTHON" -c 'import numpy; print(numpy.__version__)')
  llvmlite=$("$PYTHON" -c 'import llvmlite; print(llvmlite.__version__)')
  stamp="torch $TORCH, numpy $numpy, llvmlite $llvmlite, $WHEELS"
  [ "$(cat "$root/site.stamp" 2>/dev/null)" = "$stamp" ] && return
  rm -rf "$root/site"
  # shellcheck disable=SC2086
  wheels() { "$PYTHON" -m pip install -q --target "$root/site" --only-binary=:all: --python-version 3.11 $PLATFORMS "$@"; }
  # WHEELS names torch's requirements, because pip would resolve them for the machine it runs on.
  wheels --no-deps "torch==$TORCH" || missing "torch $TORCH for aarch64 cannot be fetched"
  # shellcheck disable=SC2086
  wheels "numpy==$numpy" "llvmlite==$llvmlite" $WHEELS || missing "a wheel for aarch64 cannot be fetched"
  printf %s "$stamp" >"$root/site.stamp"
}

fetch() {
  mkdir -p "$root"
  root=$(cd "$root" && pwd)
  export AARCH64_ROOT=$root
  exec 9>"$root/lock"
  flock 9
  fetch_emulator
  fetch_system
  fetch_wheels
  (cd "$repository" && "$PYTHON" -m ci.aarch64.job metadata "$root/metadata")
  flock -u 9
}

# Child processes start through this script, because this machine cannot run arm64 programs directly.
write_python() {
  local text
  text=$(cat <<RUN
#!/bin/sh
unset PYTHONHOME LD_PRELOAD LD_LIBRARY_PATH
export AARCH64_PYTHON="\$0" PYTHONPATH="\$AARCH64_PATH\${PYTHONPATH:+:\$PYTHONPATH}"
exec "$emulator" -cpu "\${AARCH64_CPU:-max,sve-max-vq=2,sme=off}" -L "$root/system" \\
  "$root/system/usr/bin/python3.11" "\$@"
RUN
  )
  emulated=$root/python-$(printf %s "$text" | cksum | cut -d' ' -f1) # another checkout may have another
  [ -x "$emulated" ] && return
  printf '%s\n' "$text" >"$emulated.$$" && chmod +x "$emulated.$$" && mv "$emulated.$$" "$emulated"
}

path() {
  local folders=$repository/common
  for package in "$repository"/backends/*/; do folders+=:${package%/}; done
  printf %s "$folders:$repository:$root/metadata:$root/site"
}

fetch
write_python
AARCH64_PATH=$(path)
export AARCH64_PATH
cd "$repository"
case "$what" in
fetch) printf 'aarch64: %s\n' "$root" ;;
python) exec "$emulated" "$@" ;;
test) exec "$PYTHON" -m ci.aarch64.job test "$emulated" "$@" ;;
esac

#!/usr/bin/env bash
# setup.sh [build]: installs what the build and the tests need beyond Rust, on Debian and Ubuntu, or only what the build needs; does nothing
# where it is all there.
set -euo pipefail
apt=$(dirname "$0")/apt.sh
missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need cc gcc
need cc libc6-dev
need make make
need_for_tests() {
  need c++ build-essential
  need python3 python3
  need readelf binutils
  need valgrind valgrind
  # Allocators that programs preload beside us: tests/guests.rs tries those that are there.
  library() { ldconfig -p 2>/dev/null | grep -q "$1" || missing+=("$2"); }
  library libjemalloc.so.2 libjemalloc2
  library libtcmalloc_minimal.so.4 libtcmalloc-minimal4
  library libtcmalloc.so.4 libgoogle-perftools4
  library libmimalloc.so.2 libmimalloc2.0
  need node nodejs
  need npm npm
  python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || missing+=(python3-venv)
  python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
}
[ "${1:-}" = build ] || need_for_tests
if [ ${#missing[@]} -gt 0 ]; then
  "$apt" update -qq
  # Ubuntu 24.04 has libtcmalloc-minimal4t64 and libgoogle-perftools4t64 for what Debian calls without t64.
  for at in "${!missing[@]}"; do
    package=${missing[at]}
    [ -n "$(apt-cache madison "$package" 2>/dev/null)" ] || [ -z "$(apt-cache madison "${package}t64" 2>/dev/null)" ] ||
      missing[at]=${package}t64
  done
  echo "setup: installs ${missing[*]}"
  "$apt" install -y -qq --no-install-recommends "${missing[@]}"
fi
if ! command -v cargo >/dev/null 2>&1; then
  echo "setup: Rust is missing; install it with rustup (https://rustup.rs) or your distribution, 1.89 or later" >&2
  exit 1
fi
[ "${1:-}" != build ] || exit 0
# For the tests of the Python package, and for those of stacks in greenlets; without it they are skipped, and say so.
venv="$(dirname "$0")/../target/python"
if ! "$venv/bin/python" -c 'import greenlet, pytest, xdist' >/dev/null 2>&1; then
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check 'pytest>=7' pytest-xdist greenlet
fi
# Kubernetes' schemas, for the example in packaging/kubernetes.
"$venv/bin/python" -c 'import kubernetes_validate' >/dev/null 2>&1 ||
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check kubernetes-validate ||
  echo "setup: kubernetes-validate cannot be fetched; its test is skipped" >&2
# What holds the package's types, its notebooks and the wheel's metadata.
"$venv/bin/python" -c 'import build, flit_core, ipykernel, mypy, nbclient, nbconvert, trove_classifiers, twine' >/dev/null 2>&1 ||
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --timeout 15 --retries 1 \
    build 'flit_core>=3.12,<5' ipykernel mypy nbclient nbconvert trove-classifiers twine ||
  echo "setup: mypy, nbclient, nbconvert, twine or build cannot be fetched; their tests are skipped" >&2

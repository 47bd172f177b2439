#!/usr/bin/env bash
# Installs what the build and the tests need beyond Rust, on Debian and Ubuntu; does nothing where it is all there.
set -euo pipefail
missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$2"); }
need cc build-essential
need c++ build-essential
need make make
need python3 python3
need readelf binutils
need unzip unzip
python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
if [ ${#missing[@]} -gt 0 ]; then
  root=""; [ "$(id -u)" = 0 ] || root=sudo
  export DEBIAN_FRONTEND=noninteractive
  $root apt-get update -qq
  $root apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi
if ! command -v cargo >/dev/null 2>&1; then
  echo "setup: Rust is missing; install it with rustup (https://rustup.rs) or your distribution, 1.89 or later" >&2
  exit 1
fi

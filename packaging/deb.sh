#!/usr/bin/env bash
# deb.sh ARGUMENTS OF pack.py: a Debian package of the files that `pack.py tree ARGUMENTS` lays out, in target/dist.
set -euo pipefail
cd "$(dirname "$0")/.."
rm -f target/dist/gputrace_*.deb
python3 packaging/pack.py tree "$@" --out target/deb
# In the package's time stamps.
SOURCE_DATE_EPOCH=$(python3 packaging/pack.py epoch)
export SOURCE_DATE_EPOCH
# Its files are in the package as they are: stripped already.
target/tools/bin/cargo-deb --quiet --package gputrace --no-build --no-strip --locked --output target/dist/
ls target/dist/gputrace_*.deb
if command -v lintian >/dev/null; then
  # What is overridden is argued in packaging/debian/lintian-overrides.
  lintian --allow-root --fail-on error,warning target/dist/gputrace_*.deb
  echo "lintian: no errors, no warnings"
else
  echo "SKIPPED: lintian is not installed (apt-get install lintian)"
fi

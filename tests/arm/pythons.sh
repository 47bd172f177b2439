#!/bin/sh
# CPythons for AArch64, of several of Debian's suites, each below FOLDER/debian/opt/pythons/SUITE. Libraries that the root of `setup.sh`
# lacks go there, so that all run on one C library.
#
#   tests/arm/pythons.sh FOLDER [SUITE:VERSION,VERSION...]...
#
# Says which cannot be had. No suite has 3.10 and 3.12.
set -eu
folder=$1
shift
mirror=${ARM_MIRROR:-http://deb.debian.org/debian}
# The newest first: of the libraries of one name, the first stays.
[ $# -gt 0 ] || set -- unstable:3.13,3.14,3.15 testing:3.14,3.15 trixie:3.13 bookworm:3.11 bullseye:3.9
for row; do
  suite=${row%%:*} packages=
  home=$folder/debian/opt/pythons/$suite
  [ ! -e "$home" ] || continue
  for version in $(echo "${row#*:}" | tr , ' '); do
    packages=$packages,python$version-minimal,libpython$version-minimal,libpython$version-stdlib
  done
  rm -rf "$folder/python"
  if mmdebstrap --variant=extract --architectures=arm64 --include="${packages#,}" --dpkgopt='path-exclude=/usr/share/*' \
    --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' \
    "$suite" "$folder/python" "$mirror" >"$folder/python.log" 2>&1; then
    mkdir -p "$home/bin" "$home/lib"
    cp -a "$folder"/python/usr/bin/python3* "$home/bin/"
    cp -a "$folder"/python/usr/lib/python3* "$home/lib/"
    for libraries in "$folder/python/usr/lib/aarch64-linux-gnu" "$folder/python/lib/aarch64-linux-gnu"; do
      [ ! -d "$libraries" ] || cp -an "$libraries/." "$folder/debian/usr/lib/aarch64-linux-gnu/"
    done
  else
    echo "SKIPPED Python ${row#*:} of Debian $suite: not at $mirror ($(grep -m 1 '^E:' "$folder/python.log"))"
  fi
  rm -rf "$folder/python"
done

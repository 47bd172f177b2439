#!/bin/sh
# What the torture finds on a machine, for AArch64: a shell, and allocators that programs preload, below FOLDER/debian.
#
#   tests/arm/guests.sh FOLDER
#
# Says if they cannot be had; the scenarios that need them are then skipped.
set -eu
folder=$1
mirror=${ARM_MIRROR:-http://deb.debian.org/debian}
[ ! -e "$folder/debian/opt/arm/dash" ] || exit 0
rm -rf "$folder/guests"
if mmdebstrap --variant=extract --architectures=arm64 --include=dash,libjemalloc2,libgoogle-perftools4,libtcmalloc-minimal4,libmimalloc2.0 \
  --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' \
  bookworm "$folder/guests" "$mirror" >"$folder/guests.log" 2>&1; then
  for libraries in "$folder/guests/usr/lib/aarch64-linux-gnu" "$folder/guests/lib/aarch64-linux-gnu"; do
    [ ! -d "$libraries" ] || cp -an "$libraries/." "$folder/debian/usr/lib/aarch64-linux-gnu/"
  done
  cp "$(find "$folder/guests" -name dash -type f -perm -100 | head -1)" "$folder/debian/opt/arm/dash"
else
  echo "SKIPPED a shell and allocators for AArch64: not at $mirror ($(grep -m 1 '^E:' "$folder/guests.log"))"
fi
rm -rf "$folder/guests"

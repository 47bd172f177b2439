#!/bin/sh
# Unpacks the wheel or the tarball for AArch64 and runs its files under emulation, with CPython of Debian's for AArch64.
#
#   tests/arm/packages.sh FOLDER PACKAGES wheel|tarball
#
# FOLDER is the one of `setup.sh`, PACKAGES has what packaging/pack.py made. Without a Python it says so, and ends well.
set -eu
folder=$(realpath "$1")
packages=$(realpath "$2")
what=$3
here=$(cd "$(dirname "$0")" && pwd)
unpacked=$folder/target/unpacked/$what
rm -rf "$unpacked"
mkdir -p "$unpacked"
case $what in
# As pip does: programs are executable.
wheel) python3 -m zipfile -e "$packages"/gputrace-*-manylinux_2_17_aarch64.whl "$unpacked" && chmod +x "$unpacked"/gputrace/bin/* ;;
tarball) tar -xzf "$packages"/gputrace-*-aarch64-linux.tar.gz -C "$unpacked" --strip-components 1 ;;
esac
"$here/pythons.sh" "$folder" trixie:3.13
python=/opt/pythons/trixie/bin/python3.13
[ -e "$folder/debian$python" ] || { echo "SKIPPED: running the $what for AArch64: no Python for it" && exit 0; }
"$here/inside.sh" "$folder" build cargo build --quiet --offline --locked --release -p gputrace-fake-cuda --bin fake-cuda
exec "$here/inside.sh" "$folder" run $python "$here/packages.py" "$what" "$unpacked" "$folder/target/aarch64-unknown-linux-gnu/release/fake-cuda"

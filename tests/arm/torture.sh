#!/bin/sh
# The torture's short form (`tests/torture`), its programs, library and recorder for AArch64, under emulation.
#
#   tests/arm/torture.sh FOLDER
#
# FOLDER is the one of `setup.sh`, where the programs are built. What starts and judges them is of this machine. TORTURE_TEST names it, if it
# is built already, and GPUTRACE_TORTURE_ONLY=WORD runs some of the scenarios.
set -eu
folder=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
cd "$here/../.."
"$here/guests.sh" "$folder"
"$here/pythons.sh" "$folder" trixie:3.13
program=${TORTURE_TEST:-$(cargo test --release --no-run -p gputrace-tests --test torture 2>&1 | sed -n 's/.*Executable .*(\(.*\)).*/\1/p')}
[ -n "$program" ] || { echo "tests/arm/torture.sh: the torture cannot be built" && exit 1; }
exec "$here/inside.sh" "$folder" run env GPUTRACE_TEST_BUILT="$folder/target/aarch64-unknown-linux-gnu/release" \
  GPUTRACE_TEST_PYTHONS=/opt/pythons/trixie/bin/python3.13 \
  ${GPUTRACE_TORTURE_ONLY:+GPUTRACE_TORTURE_ONLY="$GPUTRACE_TORTURE_ONLY"} "$program" --nocapture

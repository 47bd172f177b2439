#!/bin/sh
# Builds for AArch64 in a Debian of its own below FOLDER, runs that under QEMU, and compares it with x86-64.
#
#   tests/arm/run.sh FOLDER RELEASE [PART...]
#
# RELEASE has the programs of this machine. Parts: those of check.py, `oracle` and `torture`; all unless some are named. Each may take
# ARM_PART_SECONDS (1800). Says what it cannot try here and why, and then ends well; fails if anything differs. ARM_JOBS limits the compilers
# that run at once.
set -eu
folder=$1 release=$2
shift 2
here=$(dirname "$0")
parts=${*:-demo programs pythons tests oracle torture}
seconds=${ARM_PART_SECONDS:-1800}
now() { date +%s; }
began=$(now)
if "$here/setup.sh" "$folder"; then :; else
  status=$?
  [ $status = 77 ] || exit $status
  exit 0
fi
"$here/inside.sh" "$folder" build true || { echo "SKIPPED: AArch64: $folder/debian cannot be entered here (mounts in a user namespace)" && exit 0; }
echo "== root: $(($(now) - began)) s"
since=$(now)
cargo fetch --quiet --locked --target aarch64-unknown-linux-gnu || { echo "SKIPPED: AArch64: crates cannot be fetched" && exit 0; }
"$here/inside.sh" "$folder" build cargo build --quiet --offline --locked ${ARM_JOBS:+--jobs $ARM_JOBS} --release -p gputrace-shim -p gputrace \
  -p gputrace-fake-cuda --lib --bin gputrace --bin fake-cuda
echo "== build: $(($(now) - since)) s"
differ=
for part in $parts; do
  since=$(now)
  case $part in
  pythons) "$here/pythons.sh" "$folder" ;;
  programs)
    [ -e "$folder/wheels" ] || WHEEL_MACHINE=aarch64 python3 "$here/../wheel.py" nvidia-cuda-runtime-cu12 "$folder/wheels" '*/libcudart.so.12' || true ;;
  esac
  status=0
  case $part in
  # The first release whose packages for AArch64 have the allocator for CUDA, and others of each rule for ties.
  oracle)
    ORACLE_SEEDS=${ORACLE_SEEDS:-2} ORACLE_STEPS=${ORACLE_STEPS:-300} timeout "$seconds" "$here/oracle.sh" "$folder" 2.11.0 2.13.0 2.15.0 || status=$?
    [ $status != 77 ] || status=0 ;;
  torture) timeout "$seconds" "$here/torture.sh" "$folder" || status=$? ;;
  *) timeout "$seconds" python3 "$here/check.py" "$folder" "$release" "$part" || status=$? ;;
  esac
  [ $status != 124 ] || echo "FAILED: $part did not end within $seconds s"
  [ $status = 0 ] || differ="$differ $part"
  echo "== $part: $(($(now) - since)) s"
done
echo "== AArch64 under emulation: $(($(now) - began)) s, parts that differ from x86-64:${differ:- none}"
[ -z "$differ" ]

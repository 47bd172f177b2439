#!/bin/sh
# Holds the simulator, on this machine, against PyTorch's own compiled allocator for AArch64, under emulation.
#
#   tests/arm/oracle.sh FOLDER VERSION...
#
# FOLDER is the one of `setup.sh`. PyTorch's packages for AArch64 have the allocator from 2.11 on. Exits with 77 where they cannot be
# fetched. ORACLE_SEEDS and ORACLE_STEPS: sim/src/policies/torch/oracle/mod.rs.
set -eu
folder=$(realpath "$1")
shift
here=$(cd "$(dirname "$0")" && pwd)
WHEEL_MACHINE=aarch64 CC="$here/inside.sh $folder run gcc" CXX="$here/inside.sh $folder run g++" \
  ORACLE_RUNNER="$folder/debian/usr/bin/qemu-aarch64 -L $folder/debian" "$here/../oracle/build.sh" "$folder/oracle" "$@"
cd "$here/../.."
GPUTRACE_ORACLE=$folder/oracle exec ${ORACLE_TEST:-cargo test --release -p gputrace-sim --lib --} oracle --nocapture

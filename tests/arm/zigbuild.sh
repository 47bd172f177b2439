#!/bin/sh
# cargo-zigbuild for AArch64 and C libraries from 2.17 on, in the Debian of `setup.sh`.
#
#   tests/arm/zigbuild.sh ZIG OPTIONS...
#
# ZIG is the bin folder of the environment that `make portable` makes.
set -eu
zig=$1
shift
# The compilers of `inside.sh` are for its own C library.
unset CC CXX CC_aarch64_unknown_linux_gnu AR_aarch64_unknown_linux_gnu CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER CARGO_BUILD_TARGET
export CARGO_ZIGBUILD_ZIG_PATH=$(echo "$zig"/../lib/python3*/site-packages/ziglang/zig)
export XDG_CACHE_HOME=${CARGO_TARGET_DIR:-/tmp}/zig-cache
exec "$zig/cargo-zigbuild" zigbuild --offline --locked --target aarch64-unknown-linux-gnu.2.17 "$@"

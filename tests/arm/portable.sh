#!/bin/sh
# Program and library for AArch64 and C libraries from 2.17 on, as `make portable` makes those for x86-64. In the Debian of `setup.sh`, in
# the repository's folder.
#
#   tests/arm/portable.sh ZIG TARGET
#
# ZIG is the bin folder of the environment that has zig; TARGET is where cargo builds. No path of this machine gets into the files.
set -eu
zig=$1
target=aarch64-unknown-linux-gnu
# Those of `inside.sh` are for quick builds.
unset CARGO_PROFILE_RELEASE_OPT_LEVEL CARGO_BUILD_TARGET
export CARGO_TARGET_DIR=$2 CARGO_INCREMENTAL=0 CARGO_PROFILE_RELEASE_DEBUG=line-tables-only
export RUSTFLAGS="--remap-path-prefix=$PWD=/gputrace --remap-path-prefix=$HOME/.cargo=/cargo"
export CFLAGS="-ffile-prefix-map=$PWD=/gputrace -ffile-prefix-map=$HOME/.cargo=/cargo"
# The library needs nothing newer by itself (tests/tidy.rs).
cargo build --offline --locked --release -p gputrace-shim --target $target
# The compilers of `inside.sh` are for its own C library.
unset CC CXX CC_aarch64_unknown_linux_gnu AR_aarch64_unknown_linux_gnu CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER
export CARGO_ZIGBUILD_ZIG_PATH=$(echo "$zig"/../lib/python3*/site-packages/ziglang/zig) XDG_CACHE_HOME=$2/zig-cache
exec "$zig/cargo-zigbuild" zigbuild --offline --locked --release -p gputrace --bin gputrace --features objects,mcp --target $target.2.17

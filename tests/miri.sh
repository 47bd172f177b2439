#!/usr/bin/env bash
# Interprets the unit tests of the ring and of the trace format with Miri, which sees each access outside of what a pointer
# may reach, each read of what was never written, each race and each broken promise of an `unsafe` block.
#
# Miri comes with nightly toolchains: `rustup toolchain install nightly --component miri rust-src`. Where there is none,
# the same tests run with overflow and pointer checks under valgrind's memcheck, which sees less: accesses outside of any
# allocation, and decisions on what was never written. AddressSanitizer and ThreadSanitizer are `make sanitize`.
set -euo pipefail
cd "$(dirname "$0")/.."
packages=(-p gputrace-ring -p gputrace-schemas)
if cargo +nightly miri --version >/dev/null 2>&1; then
  echo "miri: $(cargo +nightly miri --version)"
  # Files and clocks of the machine are read. Tree borrows: FlatBuffers hands out several views of one buffer.
  MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-tree-borrows" cargo +nightly miri test --target-dir target/miri "${packages[@]}" --lib --test trace
  exit
fi
if ! command -v valgrind >/dev/null; then
  echo "miri: neither a nightly toolchain with Miri nor valgrind is here" >&2
  exit 1
fi
echo "miri: no nightly toolchain with Miri is here; memcheck takes its place, and sees less"
# What takes minutes under valgrind is left out: the same code on many inputs.
host=$(rustc -vV | sed -n 's/^host: //p')
runner=CARGO_TARGET_$(tr 'a-z-' 'A-Z_' <<<"$host")_RUNNER
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zub-checks=yes -Coverflow-checks=yes -Cdebug-assertions=yes"
env "$runner=valgrind -q --error-exitcode=99 --fair-sched=yes" \
  cargo test -q --target-dir target/miri "${packages[@]}" --lib --test trace \
  -- --skip every_prefix --skip a_flipped_bit --skip several_blocks --skip training_loop

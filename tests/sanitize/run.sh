#!/usr/bin/env bash
# Runs the shim, the stack capture, the ring and the trace format under AddressSanitizer and ThreadSanitizer:
#
#     tests/sanitize/run.sh                    # both
#     tests/sanitize/run.sh thread
#
# The runtimes are part of every stable toolchain; RUSTC_BOOTSTRAP allows the one flag that is not. The shim has no `std`,
# so all of it is instrumented; the programs around it are C. Its recorder is another process and runs without a sanitizer.
set -euo pipefail
cd "$(dirname "$0")/../.."
export RUSTC_BOOTSTRAP=1
host=$(rustc -vV | sed -n 's/^host: //p')
# Where gputrace and the fake driver were built, without a sanitizer.
plain=${GPUTRACE_BUILT:-$PWD/target/release}
CC=${CC:-cc}
fake=$("$plain/fake-cuda" --dir)
work=$PWD/target/sanitize
mkdir -p "$work"
summary=() failed=0
# Name, then a command.
check() {
  local name=$1 log=$work/log
  shift
  if "$@" >"$log" 2>&1; then
    summary+=("$(printf '%-60s ok' "$name")")
  else
    summary+=("$(printf '%-60s FAILED' "$name")") failed=1
    grep -vE '^\s*(Compiling|Finished|Running)' "$log" | sed -n 1,60p
  fi
}

# A program on the fake driver under our library. Its trace must be there, and it must have found nothing.
recorded() {
  local sanitizer=$1 program=$2 folder
  shift 2
  folder=$(mktemp -d "$work/trace.XXXXXX")
  timeout -s KILL 120 env LD_LIBRARY_PATH="$fake" GPUTRACE_RECORDER="$plain/gputrace" \
    GPUTRACE_OUTPUT="$folder/%p.gtr" "$@" "$work/$sanitizer/host" "$built/libgputrace.so" "$work/$sanitizer/$program.so" || return
  "$plain/gputrace" stats "$folder"/*.gtr || return
  rm -r "$folder"
}

[ $# -gt 0 ] || set -- address thread
for sanitizer in "$@"; do
  target=$work/$sanitizer/target
  built=$target/$host/debug
  # What is read of a stack are words of frames, wherever they lie: no red zones between variables.
  zones=() && [ "$sanitizer" != address ] || zones=(--param asan-stack=0)
  export ASAN_OPTIONS=detect_stack_use_after_return=0:detect_leaks=0:handle_segv=0:allow_user_segv_handler=1
  export TSAN_OPTIONS=suppressions=$PWD/tests/sanitize/thread.supp:exitcode=66:handle_segv=0:report_signal_unsafe=0
  export RUSTFLAGS="-Zsanitizer=$sanitizer -Cunsafe-allow-abi-mismatch=sanitizer -Clink-arg=-rdynamic"
  [ "$sanitizer" != address ] || RUSTFLAGS+=" -Cllvm-args=-asan-stack=0"
  options="--target $host --target-dir $target"
  # Rust's own tests pass data between threads through `std`, whose locks ThreadSanitizer does not see.
  if [ "$sanitizer" = address ]; then
    check "$sanitizer: ring and trace format" cargo test -q $options -p gputrace-ring -p gputrace-schemas --lib --test trace
    check "$sanitizer: stack capture" cargo test -q $options -p gputrace-stack-harness --test native
  fi
  check "$sanitizer: libgputrace.so" cargo build -q $options -p gputrace-shim
  rustc --edition 2024 -Zsanitizer="$sanitizer" -Cunsafe-allow-abi-mismatch=sanitizer -Clink-arg=-rdynamic -g \
    tests/sanitize/host.rs -o "$work/$sanitizer/host"
  for source in tests/sanitize/storm.c tests/programs/{address_rules,code_loads,driver_families,graphs,odd_calls,proc_address}.c; do
    name=$(basename "$source" .c)
    # Instrumented, but without a runtime of its own: `host` has one.
    $CC -std=gnu11 -O1 -g -fPIC -fsanitize="$sanitizer" "${zones[@]}" -c "$source" -o "$work/$sanitizer/$name.o"
    $CC -shared "$work/$sanitizer/$name.o" -L"$fake" -l:libcuda.so.1 -o "$work/$sanitizer/$name.so"
  done
  check "$sanitizer: a storm of threads, a ring of 1 MiB" recorded "$sanitizer" storm GPUTRACE_RING_BYTES=1048576
  check "$sanitizer: a storm of threads, native stacks" recorded "$sanitizer" storm GPUTRACE_STACKS=all
  for name in address_rules code_loads driver_families graphs odd_calls proc_address; do
    check "$sanitizer: $name" recorded "$sanitizer" "$name" GPUTRACE_STACKS=all
  done
done
printf '%s\n' "${summary[@]}"
exit $failed

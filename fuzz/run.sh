#!/usr/bin/env bash
# Builds the fuzzed programs and runs each for a while, or those that are named; says what each did. Inputs that were
# worth keeping stay in target/fuzz/corpus, those that crash in target/fuzz/crashes.
#
#     FUZZ_SECONDS=3600 fuzz/run.sh            # an hour each
#     fuzz/run.sh pickle symbol_files
#
# libFuzzer's instrumentation is part of every stable compiler; AddressSanitizer needs one flag that is not, which
# RUSTC_BOOTSTRAP allows. FUZZ_SANITIZER=none does without, at twice the speed.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-60}
root=$PWD/target/fuzz
target=$(rustc -vV | sed -n 's/^host: //p')
flags="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4"
flags+=" -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table"
flags+=" -Cllvm-args=-sanitizer-coverage-trace-compares -Cllvm-args=-simplifycfg-branch-fold-threshold=0"
if [ "${FUZZ_SANITIZER:-address}" = address ]; then
  export RUSTC_BOOTSTRAP=1
  flags+=" -Zsanitizer=address"
fi
options=(--release --manifest-path fuzz/Cargo.toml --target "$target" --target-dir "$root")
if [ "${FUZZ_SANITIZER:-address}" = address ]; then
  RUSTFLAGS=$flags cargo build "${options[@]}"
else
  # The runtime of a sanitizer has what instrumented code calls, and so has libFuzzer: `seeds` has neither here.
  mkdir -p "$root"
  cc -O1 -c fuzz/coverage.c -o "$root/coverage.o"
  RUSTFLAGS=$flags cargo rustc "${options[@]}" --bin seeds -- -Clink-arg="$root/coverage.o"
  bins=()
  for file in fuzz/fuzz_targets/*.rs; do bins+=(--bin "$(basename "$file" .rs)"); done
  RUSTFLAGS=$flags cargo build "${options[@]}" "${bins[@]}"
fi
built=$root/$target/release
programs=("$@")
[ $# -gt 0 ] || for file in fuzz/fuzz_targets/*.rs; do programs+=("$(basename "$file" .rs)"); done

rm -rf "$root/seeds"
# The generator is instrumented like the rest, and leaks like any program that ends.
ASAN_OPTIONS=detect_leaks=0 "$built/seeds" "$root/seeds" tests/golden
memory=/dev/shm
[ -w $memory ] || memory=${TMPDIR:-/tmp}
FUZZ_SCRATCH=$(mktemp -d "$memory/gputrace-fuzz.XXXXXX")
export FUZZ_SCRATCH
trap 'rm -rf "$FUZZ_SCRATCH"' EXIT
# One program, for a while; what it did goes to target/fuzz/NAME.result.
try() {
  local program=$1 log=$root/$1.log result=ok
  mkdir -p "$root/corpus/$program" "$root/crashes"
  echo "fuzz: $program, ${seconds} s"
  if ! "$built/$program" "$root/corpus/$program" "$root/seeds/$program" -max_total_time="$seconds" -timeout=20 \
    -rss_limit_mb=3000 -max_len=65536 -print_final_stats=1 -artifact_prefix="$root/crashes/$program-" >"$log" 2>&1; then
    result=FAILED
    grep -aE 'panicked|ERROR|SUMMARY|Test unit written' -A1 "$log" | head -20
  fi
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  covered=$(grep -aoE 'cov: [0-9]+' "$log" | tail -1 | grep -oE '[0-9]+' || true)
  kept=$(find "$root/corpus/$program" -type f | wc -l)
  printf '%-14s %8s s %12s inputs %8s places reached %7s kept  %s\n' \
    "$program" "$seconds" "${runs:-?}" "${covered:-?}" "$kept" "$result" >"$root/$program.result"
}

# Each takes one processor.
for program in "${programs[@]}"; do
  rm -f "$root/$program.result"
  while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n || true; done
  try "$program" &
done
wait
failed=0
for program in "${programs[@]}"; do
  # Without a result it was not even tried.
  cat "$root/$program.result" || failed=1
  ! grep -q 'FAILED$' "$root/$program.result" || failed=1
done
exit $failed

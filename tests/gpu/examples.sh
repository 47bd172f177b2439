#!/usr/bin/env bash
# examples.sh FOLDER: records every program of examples/ on this machine's GPU and asks the question of its README.
#
# FOLDER holds `gputrace` and `libgputrace.so`. Traces and answers go to $OUT (default: a new folder): small enough to become
# tests/golden. PYTHON names another Python with PyTorch; LAUNCHER="target/release/fake-cuda" runs on the fake device.
# Passes where the answer names the line that is marked `# <- fault` in the program. Exit status 1 if one does not.
set -u
folder=$(cd "${1:?examples.sh FOLDER}" && pwd)
examples=$(cd "$(dirname "$0")/../../examples" && pwd)
out=${OUT:-$(mktemp -d)}; mkdir -p "$out"
work=$(mktemp -d)
python=${PYTHON:-python3}
n_gpus=$(${LAUNCHER:-} "$python" -c 'import torch; print(torch.cuda.device_count())')
status=0

verdict() { printf '%-5s %-22s %-26s %8s  %s\n' "$@"; }

verdict '' example fault trace ''
for readme in "$examples"/*/README.md; do
  name=$(basename "$(dirname "$readme")")
  mkdir "$work/$name"; cp "$examples/$name"/*.py "$work/$name"; cd "$work/$name" || exit 1
  program=$(echo *.py)
  line=$(grep -n '# <- fault' "$program" | cut -d: -f1)
  # The second command of the README's block; the first records.
  question=$(sed -n 's/^\$ gputrace //p' "$readme" | grep -v '^record' | head -1)
  if grep -q 'Needs two GPUs' "$program" && [ "$n_gpus" -lt 2 ]; then
    verdict SKIP "$name" "$program:$line" - "needs two GPUs, here are $n_gpus"; continue
  fi
  began=$SECONDS
  # shellcheck disable=SC2086
  timeout 100 ${LAUNCHER:-} "$folder/gputrace" record -f -o "$name.gtr" -- "$python" "$program" >"$out/$name.said" 2>&1
  code=$?
  # shellcheck disable=SC2086
  "$folder/gputrace" $question >"$out/$name.answer" 2>"$out/$name.errors"
  cp "$name.gtr" "$out/" 2>/dev/null
  bytes=$(stat -c %s "$name.gtr" 2>/dev/null || echo 0)
  if [ "$code" != 0 ]; then
    verdict FAIL "$name" "$program:$line" "$bytes" "the program ended with $code: $(tail -1 "$out/$name.said")"; status=1
  elif [ "$bytes" -gt 1000000 ]; then
    verdict FAIL "$name" "$program:$line" "$bytes" "the trace is too large to be kept"; status=1
  elif grep -q "/$program:$line)" "$out/$name.answer"; then
    verdict PASS "$name" "$program:$line" "$bytes" "$((SECONDS - began)) s: $(tail -1 "$out/$name.said")"
  else
    verdict FAIL "$name" "$program:$line" "$bytes" "gputrace $question does not name the line"; status=1
  fi
done
rm -rf "$work"
echo "traces and answers: $out"
exit $status

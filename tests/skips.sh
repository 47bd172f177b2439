#!/usr/bin/env bash
# Holds what tests skipped (the file that GPUTRACE_SKIPS named) against what is expected: a line of the second file begins
# with the first word of each that may be skipped, as it stands in the list, and says after a tab why that may be.
#
#     tests/skips.sh target/skips.txt .ci/expected-skips
set -euo pipefail
list=$1 expected=$2
[ -e "$list" ] || { echo "skips: none"; exit 0; }
cut -f1 "$list" | sort | uniq -c | sed 's/^ *\([0-9]*\) /\1 times  /'
unexpected=$(cut -f1 "$list" | sort -u | grep -vxFf <(grep -v '^#' "$expected" | cut -f1) || true)
if [ -n "$unexpected" ]; then
  echo "skips: nobody expected these ($expected has those that are):"
  grep -F "$unexpected" "$list" | sort -u
  exit 1
fi
echo "skips: $(wc -l <"$list"), all expected"

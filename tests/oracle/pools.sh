#!/usr/bin/env bash
# pools.sh ORACLE WHEELS FOLDER VERSION...: records what PyTorch's own allocator of each release does with private pools, on the
# fake device, and prints the table of pools, which is the same for all.
#
# ORACLE is the folder that build.sh made for these versions, WHEELS that of ../fetch-wheels.sh; FOLDER has gputrace,
# libgputrace.so and fake-cuda.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
oracle=$(realpath "$1") wheels=$(realpath "$2") folder=$(realpath "$3")
shift 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
wrong=0
# Reserved, allocated and active now, and most reserved and allocated of each pool.
cat >expected <<'TABLE'
(0, 0) 2097152 5120 5120 null null
(0, 5) 2097152 6144 6144 2097152 6144
(0, 7) 0 0 0 2097152 2048
(9, 0) 0 0 0 20971520 4194304
TABLE
rows='import json, sys
process = json.load(sys.stdin)["processes"][0]
for section in process["sections"]:
    for row in section.get("pools", []) if section["name"] == "pools" else []:
        columns = ("reserved_bytes", "allocated_bytes", "active_bytes", "peak_reserved_bytes", "peak_allocated_bytes")
        print(row["pool"], *[json.dumps(row.get(column)) for column in columns])'
for version in "$@"; do
    torch=$oracle/torch-$version/torch
    runtime=$(readelf -d "$torch/lib/libc10_cuda.so" | grep -o 'libcudart\.so\.[0-9]*' | head -1)
    library=$(find "$wheels" -name "$runtime" | head -1)
    header=$torch/include/c10/cuda/CUDACachingAllocator.h
    flags=
    grep -q 'setUseOnOOM' "$header" && flags+=" -DHAVE_OVERFLOW"
    grep -A4 'inline void setUseOnOOM' "$header" | grep -q 'bool use_on_oom' && flags+=" -DHAVE_OVERFLOW_FLAG"
    grep -q 'setNoSplit' "$header" && flags+=" -DHAVE_NO_SPLIT"
    abi=0
    nm -DC "$torch/lib/libc10.so" | grep -q 'torchCheckFail(char const\*, char const\*, unsigned int, std::__cxx11' && abi=1
    case $version in 2.1[2-9].*) std=20 ;; *) std=17 ;; esac
    # The headers of CUDA 13 do for all.
    g++ -std=c++$std -O1 -w -shared -fPIC -D_GLIBCXX_USE_CXX11_ABI=$abi -DC10_USE_GLOG=0 $flags -I"$torch/include" \
        -I"$oracle/cuda13/nvidia/cu13/include" -I"$oracle/crt13/nvidia/cu13/include" "$here/pools.cc" -o libpools.so \
        -L"$torch/lib" -l:libc10.so -l:libc10_cuda.so "$library" -Wl,--allow-shlib-undefined -ldl
    echo 'int run(void); int main(void) { return run(); }' |
        gcc -x c - -x none -o pools ./libpools.so -Wl,--allow-shlib-undefined -Wl,-rpath,"$work"
    echo "== $version"
    # The pipe ends when the recorder has.
    LD_LIBRARY_PATH=$torch/lib:$(dirname "$library") "$folder/fake-cuda" "$folder/gputrace" record -f -o pools.gtr -- ./pools 2>&1 | cat
    "$folder/gputrace" doctor pools.gtr | grep 'torch\.pools' || true
    "$folder/gputrace" stats pools.gtr | grep -A4 "PyTorch's pools" | cut -c1-120
    "$folder/gputrace" stats --json pools.gtr | python3 -c "$rows" >found
    diff expected found || wrong=1
    check=$("$folder/gputrace" replay pools.gtr --policy torch | grep -o 'self-check.*')
    echo "$check"
    [[ $check =~ ([0-9]+)\ of\ ([0-9]+) && ${BASH_REMATCH[1]} = "${BASH_REMATCH[2]}" ]] || wrong=1
done
exit $wrong

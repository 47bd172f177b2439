#!/usr/bin/env bash
# build.sh DIR VERSION...: builds DIR/oracle-VERSION, PyTorch's own caching allocator on a CUDA made of stubs.
#
# Needs pip, a C++20 compiler, readelf. Of each release's wheel it fetches two libraries and the headers, once
# (../wheel.py). Exit status 77 where PyPI cannot be reached. CC, CXX and WHEEL_MACHINE (../wheel.py) are for another processor;
# ORACLE_RUNNER is then what runs its programs.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
cd "$1"
shift

fetch() { # fetch NAME[==VERSION] DIR GLOB...
    local spec=$1 dir=$2
    shift 2
    [ -d "$dir" ] && return
    rm -rf "$dir.new"
    python3 "$here/../wheel.py" "$spec" "$dir.new" "$@"
    mv "$dir.new" "$dir"
}

for version in "$@"; do
    sources=$(cat "$here"/*.c "$here"/fence.h "$here"/harness.cpp "$here"/build.sh | cksum | tr ' ' -)
    [ -x "oracle-$version" ] && [ "$(cat "lib-$version/sources" 2>/dev/null)" = "$sources" ] && continue
    fetch "torch==$version" "torch-$version" 'torch/include/c10/*' 'torch/include/torch/headeronly/*' torch/lib/libc10.so torch/lib/libc10_cuda.so
    torch=torch-$version/torch
    runtime=$(readelf -d $torch/lib/libc10_cuda.so | grep -o 'libcudart\.so\.[0-9.]*' | head -1)
    runtime=${runtime#libcudart.so.}
    case $runtime in
    11.0)
        fetch nvidia-cuda-runtime-cu11 cuda11 '*/include/*'
        fetch nvidia-cuda-nvcc-cu12 nvcc12 '*/include/*'
        include="-Icuda11/nvidia/cuda_runtime/include -Invcc12/nvidia/cuda_nvcc/include" ;;
    12)
        fetch nvidia-cuda-runtime-cu12 cuda12 '*/include/*'
        fetch nvidia-cuda-nvcc-cu12 nvcc12 '*/include/*'
        include="-Icuda12/nvidia/cuda_runtime/include -Invcc12/nvidia/cuda_nvcc/include" ;;
    13)
        fetch nvidia-cuda-runtime cuda13 '*/include/*'
        fetch nvidia-cuda-crt crt13 '*/include/*'
        include="-Icuda13/nvidia/cu13/include -Icrt13/nvidia/cu13/include" ;;
    *)
        echo "torch $version uses libcudart.so.$runtime, which build.sh does not know" >&2
        exit 1 ;;
    esac

    lib=lib-$version
    mkdir -p "$lib"
    cp $torch/lib/libc10.so $torch/lib/libc10_cuda.so "$lib/"
    stub() { ${CC:-gcc} -O1 -w -shared -fPIC -Wl,-soname,"$1" "$here/$2" -o "$lib/$1" "${@:3}"; }
    echo "libcudart.so.$runtime { global: *; };" > "$lib/versions"
    stub libcuda.so.1 stub_driver.c
    stub libnvidia-ml.so.1 stub_nvml.c
    stub "libcudart.so.$runtime" stub_runtime.c -Wl,--version-script="$lib/versions" -L"$lib" -l:libcuda.so.1 -Wl,-rpath,'$ORIGIN' -ldl

    # What the headers and the binary say about this release.
    header=$torch/include/c10/cuda/CUDACachingAllocator.h
    flags=
    statistics="$header $torch/include/c10/core/CachingDeviceAllocator.h"
    grep -q 'endAllocateToPool' $header && flags+=" -DHAVE_POOLS"
    grep -q 'endAllocateStreamToPool' $header && flags+=" -DHAVE_STREAM_POOLS"
    grep -q 'setUseOnOOM' $header && flags+=" -DHAVE_OVERFLOW"
    grep -A4 'inline void setUseOnOOM' $header | grep -q 'bool use_on_oom' && flags+=" -DHAVE_OVERFLOW_FLAG"
    grep -q 'setNoSplit' $header && flags+=" -DHAVE_NO_SPLIT"
    grep -q 'emptyCache(MempoolId_t' $header && flags+=" -DHAVE_POOL_TRIM"
    grep -qs 'num_device_alloc' $statistics && flags+=" -DHAVE_DEVICE_COUNTERS"
    grep -qs 'num_oom_rejections' $statistics && flags+=" -DHAVE_REJECTIONS"
    abi=0
    nm -DC "$lib/libc10.so" | grep -q 'torchCheckFail(char const\*, char const\*, unsigned int, std::__cxx11' && abi=1
    case $version in 2.1[2-9].*) std=20 ;; *) std=17 ;; esac
    program=oracle-$version
    [ -z "${ORACLE_RUNNER:-}" ] || program=lib-$version/oracle
    ${CXX:-g++} -std=c++$std -O1 -w -D_GLIBCXX_USE_CXX11_ABI=$abi -DC10_USE_GLOG=0 $flags -I$torch/include $include "$here/harness.cpp" \
        -o "$program" -L"$lib" -l:libc10.so -l:libc10_cuda.so -l:libcuda.so.1 -l:"libcudart.so.$runtime" \
        -Wl,-rpath,"$PWD/$lib" -Wl,--allow-shlib-undefined -ldl
    if [ -n "${ORACLE_RUNNER:-}" ]; then
        printf '#!/bin/sh\nexec %s %s\n' "$ORACLE_RUNNER" "$PWD/$program" > "oracle-$version"
        chmod +x "oracle-$version"
    fi
    echo "$sources" > "$lib/sources"
    echo "built oracle-$version"
done

#!/usr/bin/env bash
# who.sh ORACLE WHEELS FOLDER VERSION...: holds `gputrace who` against the history that PyTorch's own allocator of each release keeps of
# the same run, on the fake device: ten addresses with most owners, with segments of fixed size and with expandable ones.
#
# ORACLE is the folder that build.sh made for these versions: 2.11 or later, but for 2.13, which asks NVML for more than the stand-in
# has. WHEELS is that of ../fetch-wheels.sh; FOLDER has gputrace, libgputrace.so and fake-cuda.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
oracle=$(realpath "$1") wheels=$(realpath "$2") folder=$(realpath "$3")
shift 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
compare='import json, subprocess, sys
from collections import defaultdict
gputrace, trace, rows = sys.argv[1:]
lives, there, by_address = [], {}, defaultdict(int)
for row in open(rows):
    action, address, size = map(int, row.split())
    if action == 0:
        there[address] = [address, size, False]
        lives.append(there[address])
        by_address[address] += 1
    elif address in there:
        there.pop(address)[2] = True
asked = sorted(by_address, key=lambda address: (-by_address[address], address))[:10]
wrong = n_owners = 0
for address in asked:
    inside = [life for life in lives if life[0] <= address < life[0] + life[1]]
    said = json.loads(subprocess.run([gputrace, "who", "--json", hex(address), trace], capture_output=True, text=True, check=True).stdout)
    section = next(it for it in said["processes"][0]["sections"] if it["name"] == "owners_of_address")
    blocks = [it for it in section["owners"] if it["what"] == "block" and it["offset_bytes"] < it["requested_bytes"]]
    found = [[int(it["address"], 16), it["requested_bytes"], it["until_ns"] is not None] for it in blocks]
    n_owners += len(found)
    if found != inside:
        wrong += 1
        print(hex(address), "WRONG\n", inside, "\n", found)
print(len(asked), "addresses,", n_owners, "owners,", wrong, "wrong")
sys.exit(wrong > 0 or len(asked) < 10)'
status=0
for version in "$@"; do
    torch=$oracle/torch-$version/torch
    runtime=$(readelf -d "$torch/lib/libc10_cuda.so" | grep -o 'libcudart\.so\.[0-9]*' | head -1)
    library=$(find -L "$wheels" -name "$runtime" | head -1)
    abi=0
    nm -DC "$torch/lib/libc10.so" | grep -q 'torchCheckFail(char const\*, char const\*, unsigned int, std::__cxx11' && abi=1
    case $version in 2.1[2-9].*) std=20 ;; *) std=17 ;; esac
    # The headers of CUDA 13 do for all.
    g++ -std=c++$std -O1 -w -shared -fPIC -D_GLIBCXX_USE_CXX11_ABI=$abi -DC10_USE_GLOG=0 -I"$torch/include" \
        -I"$oracle/cuda13/nvidia/cu13/include" -I"$oracle/crt13/nvidia/cu13/include" "$here/who.cc" -o libwho.so \
        -L"$torch/lib" -l:libc10.so -l:libc10_cuda.so "$library" -Wl,--allow-shlib-undefined -ldl
    echo 'int run(void); int main(void) { return run(); }' |
        gcc -x c - -x none -o who ./libwho.so -Wl,--allow-shlib-undefined -Wl,-rpath,"$work"
    for settings in "" expandable_segments:True; do
        # The pipe ends when the recorder has.
        LD_LIBRARY_PATH=$torch/lib:$(dirname "$library") PYTORCH_CUDA_ALLOC_CONF=$settings PYTORCH_ALLOC_CONF=$settings \
            "$folder/fake-cuda" "$folder/gputrace" record -f -o who.gtr -- ./who 2>said | cat >rows
        echo "== $version ${settings:-segments of fixed size}"
        python3 -c "$compare" "$folder/gputrace" who.gtr rows || status=1
    done
done
exit $status

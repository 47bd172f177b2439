#!/bin/sh
# A Debian with cross compilers for AArch64, Rust's standard library for it, and the C library to run programs on, below FOLDER/debian.
#
#   tests/arm/setup.sh FOLDER
#
# Exits with 77 and says why, where that cannot be had. Does nothing where it is there already.
set -eu
folder=$1
mirror=${ARM_MIRROR:-http://deb.debian.org/debian}
[ ! -e "$folder/ready" ] || exit 0
missing() {
  echo "SKIPPED: AArch64: $1"
  exit 77
}
for tool in mmdebstrap qemu-aarch64-static unshare; do
  command -v "$tool" >/dev/null || missing "no $tool (apt-get install mmdebstrap qemu-user-static util-linux)"
done
# Programs of AArch64 are run by their own name: a table of the kernel that each user namespace has for itself (Linux 6.7).
unshare -Urm sh -c 'mount -t binfmt_misc none /proc/sys/fs/binfmt_misc' 2>/dev/null ||
  missing "binfmt_misc cannot be mounted in a user namespace (Linux 6.7 or later, and user namespaces)"
rm -rf "$folder/debian" "$folder/libraries"
mkdir -p "$folder"
# A mirror's unstable suite may be older than it says it may be.
debian() {
  mmdebstrap --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' "$@"
}
debian --variant=minbase --architectures=amd64,arm64 \
  --include=rustc,cargo,libstd-rust-dev:arm64,gcc,libc6-dev,gcc-aarch64-linux-gnu,g++-aarch64-linux-gnu,ca-certificates,util-linux \
  unstable "$folder/debian" "$mirror" >"$folder/setup.log" 2>&1 || missing "no Debian unstable from $mirror: $folder/setup.log"
# Only unpacked: its programs cannot run before there is anything to run them with.
debian --variant=extract --architectures=arm64 --include=libc6,libgcc-s1,libstdc++6,python3-minimal,libpython3-stdlib \
  unstable "$folder/libraries" "$mirror" >>"$folder/setup.log" 2>&1 || missing "no arm64 packages from $mirror: $folder/setup.log"
cp -a "$folder/libraries/usr/lib/aarch64-linux-gnu" "$folder/libraries/usr/lib/ld-linux-aarch64.so.1" "$folder/debian/usr/lib/"
mkdir -p "$folder/debian/opt/python/bin" "$folder/debian/opt/python/lib"
cp -a "$folder/libraries"/usr/bin/python3* "$folder/debian/opt/python/bin/"
cp -a "$folder/libraries"/usr/lib/python3* "$folder/debian/opt/python/lib/"
rm -rf "$folder/libraries"
mkdir -p "$folder/debian/opt/arm/bin" "$folder/debian/opt/arm/protected"
for name in cc gcc; do
  printf '#!/bin/sh\nexec /usr/bin/aarch64-linux-gnu-gcc -mbranch-protection=standard "$@"\n' >"$folder/debian/opt/arm/protected/$name"
  chmod +x "$folder/debian/opt/arm/protected/$name"
done
for name in cc gcc; do ln -sf /usr/bin/aarch64-linux-gnu-gcc "$folder/debian/opt/arm/bin/$name"; done
for name in c++ g++; do ln -sf /usr/bin/aarch64-linux-gnu-g++ "$folder/debian/opt/arm/bin/$name"; done
# NVIDIA's CUDA runtime for AArch64, for programs that use it; without it they are skipped.
mkdir -p "$folder/target/cudart"
if python3 -m pip download -q --no-deps --only-binary=:all: --platform manylinux2014_aarch64 -d "$folder/wheels" \
  nvidia-cuda-runtime-cu12 >>"$folder/setup.log" 2>&1; then
  python3 -m zipfile -e "$folder"/wheels/nvidia_cuda_runtime_cu12-*.whl "$folder/wheels/unpacked"
  cp "$folder"/wheels/unpacked/nvidia/cuda_runtime/lib/libcudart.so.12 "$folder/target/cudart/"
fi
touch "$folder/ready"

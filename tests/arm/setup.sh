#!/bin/sh
# A Debian with cross compilers for AArch64, Rust's standard library for it, QEMU, and the C library to run programs on, below
# FOLDER/debian. Packages are unpacked and not installed, which needs none of their scripts, and runs nothing of AArch64.
#
#   tests/arm/setup.sh FOLDER
#
# Exits with 77 and says why, where that cannot be had. Does nothing where it is there already, unless this file has changed.
# ARM_MIRROR and ARM_SUITE name another mirror and another suite; Debian's stable has an older Rust than this needs. A mirror that takes
# longer than ARM_SETUP_SECONDS (600) is given up.
set -eu
folder=$1
mirror=${ARM_MIRROR:-http://deb.debian.org/debian}
suite=${ARM_SUITE:-testing}
made=$(echo "$mirror $suite" | cat - "$0" | cksum)
[ "$(cat "$folder/ready" 2>/dev/null)" != "$made" ] || exit 0
missing() {
  echo "SKIPPED: AArch64: $1"
  exit 77
}
for tool in mmdebstrap unshare; do
  command -v "$tool" >/dev/null || missing "no $tool (apt-get install mmdebstrap util-linux)"
done
# Programs of AArch64 are run by their own name: a table of the kernel that each user namespace has for itself (Linux 6.7).
unshare -Urm sh -c 'mount -t binfmt_misc none /proc/sys/fs/binfmt_misc' 2>/dev/null ||
  missing "binfmt_misc cannot be mounted in a user namespace (Linux 6.7 or later, and user namespaces)"
rm -rf "$folder/debian" "$folder/ready"
mkdir -p "$folder"
# What programs run on, and Rust's library, without what that depends on: a compiler for AArch64.
cat >"$folder/arm64.sh" <<'END'
set -eu
mkdir "$1/tmp/arm64"
cd "$1/tmp/arm64"
export APT_CONFIG=$MMDEBSTRAP_APT_CONFIG
apt-get -o APT::Sandbox::User=root download libstd-rust-dev:arm64 libc6:arm64 libgcc-s1:arm64 libstdc++6:arm64
for package in *.deb; do dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$1"; done
cd /
rm -r "$1/tmp/arm64"
END
# A mirror's suite may be older than it says it may be.
timeout "${ARM_SETUP_SECONDS:-600}" mmdebstrap --variant=extract --architectures=amd64,arm64 --extract-hook="sh '$folder/arm64.sh' \"\$1\"" \
  --aptopt='Acquire::Check-Valid-Until "false"' --aptopt='APT::Install-Recommends "false"' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/bin/qemu-*' --dpkgopt='path-include=/usr/bin/qemu-aarch64' --dpkgopt='path-exclude=/usr/bin/*-lto-dump-*' \
  --include=base-files,dash,coreutils,sed,grep,findutils,util-linux,qemu-user,rustc,cargo,gcc,libc6-dev,g++-aarch64-linux-gnu \
  "$suite" "$folder/debian" "$mirror" >"$folder/setup.log" 2>&1 || missing "no Debian $suite from $mirror: $folder/setup.log"
# Made by a user who is not root, it belongs to one of that user's other numbers (subuid(5)).
[ -w "$folder/debian" ] || missing "$folder/debian is not ours: try it as root"
mkdir -p "$folder/debian/opt/arm/bin" "$folder/debian/opt/arm/protected"
for name in cc gcc; do
  printf '#!/bin/sh\nexec /usr/bin/aarch64-linux-gnu-gcc -mbranch-protection=standard "$@"\n' >"$folder/debian/opt/arm/protected/$name"
  chmod +x "$folder/debian/opt/arm/protected/$name"
  ln -sf /usr/bin/aarch64-linux-gnu-gcc "$folder/debian/opt/arm/bin/$name"
done
for name in c++ g++; do ln -sf /usr/bin/aarch64-linux-gnu-g++ "$folder/debian/opt/arm/bin/$name"; done
# Debian's packages make these links when they are installed.
for name in cc gcc; do [ -e "$folder/debian/usr/bin/$name" ] || ln -sf x86_64-linux-gnu-gcc "$folder/debian/usr/bin/$name"; done
echo "$made" >"$folder/ready"

#!/bin/sh
# Runs a command in the Debian of `setup.sh`, where programs of AArch64 run by QEMU, and where the repository and FOLDER are what they
# are outside. In this folder, if it is in the repository.
#
#   tests/arm/inside.sh FOLDER build|run COMMAND...
#
# `build` finds the compilers of this machine as cc, for what a build itself runs; `run` finds those for AArch64.
set -eu
folder=$(realpath "$1")
how=$2
shift 2
repository=$(realpath "$(dirname "$0")/../..")
registry=${CARGO_HOME:-$HOME/.cargo}/registry
mkdir -p "$folder/target" "$registry"
here=$PWD
case $here/ in "$repository"/*) ;; *) here=$repository ;; esac
# A link, where the repository is a copy of another.
tools=$(realpath -m "$repository/target/tools")
mkdir -p "$tools"
export folder how repository registry tools here
exec unshare -Urm sh -euc '
  mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
  # An ELF file (64 bits, little endian) for machine 183, run by an interpreter that was opened now (binfmt_misc(5), flag F).
  printf "%s" ":arm:M::\\x7fELF\\x02\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x00\\xb7\\x00:\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xfe\\xff\\xff\\xff:$folder/debian/usr/bin/qemu-aarch64:F" >/proc/sys/fs/binfmt_misc/register
  root=$folder/debian
  mkdir -p "$root/mnt"
  # A mount of its own, as programs expect of what they see as /.
  mount --bind "$root" "$root"
  # With what is mounted below: a user namespace may not look beneath it.
  for shared in "$repository" "$folder/target" "$tools" /tmp; do
    mkdir -p "$root$shared"
    mount --rbind "$shared" "$root$shared"
  done
  mkdir -p "$root/opt/user/.cargo/registry"
  mount --bind "$registry" "$root/opt/user/.cargo/registry"
  for system in /proc /dev /sys; do mount --rbind $system "$root$system"; done
  # Programs for AArch64 start its shell.
  [ "$how" = build ] || [ ! -e "$root/opt/arm/dash" ] || mount --bind "$root/opt/arm/dash" "$root/usr/bin/dash"
  path=/usr/bin:/bin
  [ "$how" = build ] || path=/opt/arm/bin:$path
  exec chroot "$root" /usr/bin/env -i HOME=/opt/user PATH=$path TERM=dumb LANG=C.UTF-8 QEMU_CPU=${QEMU_CPU:-max} \
    CARGO_TARGET_DIR="$folder/target" CARGO_BUILD_TARGET=aarch64-unknown-linux-gnu \
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
    CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc AR_aarch64_unknown_linux_gnu=aarch64-linux-gnu-ar \
    CC=aarch64-linux-gnu-gcc CXX=aarch64-linux-gnu-g++ \
    CARGO_PROFILE_RELEASE_OPT_LEVEL=1 ${ARM_ENVIRONMENT:-} \
    sh -c "cd \"\$0\" && exec \"\$@\"" "$here" "$@"
' sh "$@"

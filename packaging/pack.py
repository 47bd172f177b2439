#!/usr/bin/env python3
"""pack.py wheel|tarball|tree|epoch --program FILE --library FILE --out DIR: what users install, the same bytes for the same files. A tree is
what replay/Cargo.toml makes a Debian package of.

All have the program and libgputrace.so without debug information, which goes to DIR/debug, and the licences of all that is in
them. None is made of files that need a C library newer than 2.17, or that are larger than a package may be.
"""
import argparse
import base64
import calendar
import csv
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile

try:
    import tomllib
except ModuleNotFoundError:  # Python before 3.11: pip has it, under its first name
    from pip._vendor import tomli as tomllib

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NEWEST_GLIBC = (2, 17)
MOST_BYTES = 12 << 20
LICENCES = ["LICENSE-APACHE", "LICENSE-MIT"]
THIRD_PARTY = "THIRD-PARTY.txt"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["wheel", "tarball", "tree", "epoch"])
    for name in ["program", "library", "out"]:
        parser.add_argument(f"--{name}")
    parser.add_argument("--any-glibc", action="store_true", help="for a trial on this machine alone")
    parser.add_argument("--arch", choices=["x86_64", "aarch64"], default="x86_64", help="the processor that the files are for")
    parser.add_argument("--inside", default="", help="the command that runs programs of another processor, and has its objcopy")
    arguments = parser.parse_args()
    if arguments.what == "epoch":
        return print(EPOCH)
    if not (arguments.program and arguments.library and arguments.out):
        parser.error("--program, --library and --out are missing")
    arch, inside = arguments.arch, shlex.split(arguments.inside)
    objcopy = [*inside, f"{arch}-linux-gnu-objcopy"] if inside else ["objcopy"]
    os.makedirs(arguments.out, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        binaries = {}
        for name, path in [("gputrace", arguments.program), ("libgputrace.so", arguments.library)]:
            if not arguments.any_glibc:
                check_glibc(path)
            binaries[name] = stripped(objcopy, path, name, scratch, os.path.join(arguments.out, "debug"))
        if arguments.what == "wheel":
            name, data = wheel(arch, binaries)
        else:
            pages = manual([*inside, os.path.abspath(arguments.program)], scratch)
            if arguments.what == "tree":
                return tree(arch, binaries, pages, arguments.out)
            name, data = tarball(arch, binaries, pages)
    if len(data) > MOST_BYTES:
        sys.exit(f"pack.py: {name} has {len(data)} bytes, and may have {MOST_BYTES}")
    path = os.path.join(arguments.out, name)
    with open(path, "wb") as file:
        file.write(data)
    print(f"{path}: {len(data) / 2**20:.2f} MiB, {hashlib.sha256(data).hexdigest()}")


def stripped(objcopy, path, name, scratch, debug):
    """The file's bytes without debug information, which goes into a separate file that debuggers find by name."""
    os.makedirs(debug, exist_ok=True)
    symbols, bare = os.path.join(debug, name + ".debug"), os.path.join(scratch, name)
    run(*objcopy, "--only-keep-debug", path, symbols)
    os.chmod(symbols, 0o644)
    run(*objcopy, "--strip-all", f"--add-gnu-debuglink={symbols}", path, bare)
    return read(bare)


def check_glibc(path):
    """Refuses a binary that needs newer glibc symbols than the wheel's platform tag promises."""
    needed = run("readelf", "--version-info", "--wide", path)
    versions = [tuple(map(int, version.split("."))) for version in re.findall(r"Name: GLIBC_([0-9.]+)", needed)]
    newest = max(versions, default=(0,))
    if newest > NEWEST_GLIBC:
        sys.exit(f"pack.py: {path} needs GLIBC_{'.'.join(map(str, newest))}; packages are for 2.17")


def version():
    found = re.search(r'(?m)^version = "(.*)"$', read(f"{ROOT}/Cargo.toml").decode())[1]
    package = re.search(r'__version__ = "(.*)"', read(f"{ROOT}/python/src/gputrace/__init__.py").decode())[1]
    if found != package:
        sys.exit(f"pack.py: Cargo.toml says {found}, and the Python package {package}")
    return found


def wheel(arch, binaries):
    """(name, bytes): https://packaging.python.org/en/latest/specifications/binary-distribution-format/"""
    name, tag = f"gputrace-{version()}", f"py3-none-manylinux_2_17_{arch}"
    info = f"{name}.dist-info"
    files = {}
    source = f"{ROOT}/python/src"
    for file in sorted(os.listdir(f"{source}/gputrace")):
        if file.endswith(".py") or file == "py.typed":
            files[f"gputrace/{file}"] = read(f"{source}/gputrace/{file}")
    for file, data in binaries.items():
        files[f"gputrace/bin/{file}"] = data
    for file in LICENCES:
        files[f"{info}/licenses/{file}"] = read(f"{ROOT}/{file}")
    files[f"{info}/licenses/{THIRD_PARTY}"] = third_party(arch)
    files[f"{info}/METADATA"] = metadata().encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: pack.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/entry_points.txt"] = entry_points().encode()
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([path, f"sha256={digest}", len(data)])
    rows.writerow([f"{info}/RECORD", "", ""])
    files[f"{info}/RECORD"] = record.getvalue().encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path, moment())
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = (0o100755 if path.startswith("gputrace/bin/") else 0o100644) << 16
            archive.writestr(entry, data)
    return f"{name}-{tag}.whl", packed.getvalue()


def metadata():
    """Core metadata 2.4 (https://packaging.python.org/en/latest/specifications/core-metadata/) of python/pyproject.toml."""
    project = pyproject()
    lines = [
        "Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {version()}", f"Summary: {project['description']}",
        f"Keywords: {','.join(project['keywords'])}", *(f"Author: {author['name']}" for author in project["authors"]),
        f"License-Expression: {project['license']}", *(f"License-File: {file}" for file in [*LICENCES, THIRD_PARTY]),
        *(f"Classifier: {classifier}" for classifier in project["classifiers"]),
        *(f"Project-URL: {name}, {url}" for name, url in project.get("urls", {}).items()),
        f"Requires-Python: {project['requires-python']}",
    ]
    for extra, packages in project["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {package}; extra == "{extra}"' for package in packages)]
    lines.append("Description-Content-Type: text/markdown")
    return "\n".join(lines) + "\n\n" + read(f"{ROOT}/python/{project['readme']}").decode()


def entry_points():
    project = pyproject()
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    sections = [[f"[{group}]", *(f"{name} = {place}" for name, place in named.items())] for group, named in groups.items()]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def pyproject():
    return tomllib.loads(read(f"{ROOT}/python/pyproject.toml").decode())["project"]


def tarball(arch, binaries, pages):
    """(name, bytes): to be unpacked into /usr/local, or anywhere."""
    name = f"gputrace-{version()}-{arch}-linux"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, data in sorted(prefix(arch, binaries, pages, [*LICENCES]).items()):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mtime = len(data), EPOCH
            entry.mode = 0o755 if path.startswith(("bin/", "lib/")) else 0o644
            archive.addfile(entry, io.BytesIO(data))
    return f"{name}.tar.gz", gzip.compress(packed.getvalue(), 9, mtime=0)


def tree(arch, binaries, pages, out):
    """The same as files of a folder. Debian wants a copyright file in place of the licences, and a changelog in its own format."""
    when = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(EPOCH))
    who = re.search(r'(?m)^maintainer = "(.*)"$', read(f"{ROOT}/replay/Cargo.toml").decode())[1]
    files = prefix(arch, binaries, pages, [])
    files["copyright"] = copyright(who.split(" <")[0]).encode()
    files["changelog"] = (
        f"gputrace ({version()}-1) unstable; urgency=medium\n\n  * Release {version()}: changelog.gz has what is new.\n\n -- {who}  {when}\n"
    ).encode()
    for folder in ("bin", "lib", "share"):
        shutil.rmtree(os.path.join(out, folder), ignore_errors=True)
    for path, data in files.items():
        os.makedirs(os.path.dirname(os.path.join(out, path)), exist_ok=True)
        with open(os.path.join(out, path), "wb") as file:
            file.write(data)


def copyright(who):
    """https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/"""
    mit = read(f"{ROOT}/LICENSE-MIT").decode()
    year = re.search(r"Copyright \(c\) (\d+)", mit)[1]
    terms = mit[mit.index("Permission is") :].strip()
    text = "\n".join(f" {line}" if line else " ." for line in terms.split("\n"))
    return f"""Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: gputrace
Comment: The program has libraries of others in it, unchanged. THIRD-PARTY.txt beside this file has their licences.

Files: *
Copyright: {year} {who}
License: MIT or Apache-2.0

License: MIT
{text}

License: Apache-2.0
 On Debian systems, the full text is in /usr/share/common-licenses/Apache-2.0.
"""


def prefix(arch, binaries, pages, licences):
    """The files below a prefix, by path."""
    files = {"bin/gputrace": binaries["gputrace"], "lib/libgputrace.so": binaries["libgputrace.so"], **pages}
    shared = "share/doc/gputrace"
    for file in ["README.md", "CHANGELOG.md", "SECURITY.md", "schemas/FORMAT.md", *licences]:
        files[f"{shared}/{os.path.basename(file)}"] = read(f"{ROOT}/{file}")
    for file in os.listdir(f"{ROOT}/docs"):
        if file.endswith(".md"):
            files[f"{shared}/docs/{file}"] = read(f"{ROOT}/docs/{file}")
    files[f"{shared}/skills/gputrace/SKILL.md"] = read(f"{ROOT}/skills/gputrace/SKILL.md")
    files[f"{shared}/{THIRD_PARTY}"] = third_party(arch)
    return files


def manual(program, scratch):
    """Manual pages and completions, where systems look for them below a prefix."""
    run(*program, "manual", scratch)
    places = {
        "gputrace.bash": "share/bash-completion/completions/gputrace",
        "_gputrace": "share/zsh/site-functions/_gputrace",
        "gputrace.fish": "share/fish/vendor_completions.d/gputrace.fish",
    }
    files = {to: read(f"{scratch}/completions/{file}") for file, to in places.items()}
    for page in sorted(os.listdir(f"{scratch}/man1")):
        files[f"share/man/man1/{page}"] = read(f"{scratch}/man1/{page}")
    return files


def third_party(arch):
    """The licences of all crates that are linked into the binaries, or whose macros generate code in them."""
    others = crates(arch, with_macros=True)
    text = ["gputrace has these in it, unchanged, each under its own licence."]
    for package in others:
        text.append(f"\n{'=' * 80}\n{package['name']} {package['version']}: {package['license']}\n{package['repository'] or ''}\n")
        folder = os.path.dirname(package["manifest_path"])
        for file in sorted(os.listdir(folder)):
            if re.match(r"(?i)(licen[cs]e|copying|notice|unlicense)", file) and os.path.isfile(f"{folder}/{file}"):
                text.append(read(f"{folder}/{file}").decode(errors="replace"))
    return "\n".join(text).encode()


def crates(arch, with_macros):
    """Cargo's metadata of each third-party crate in the binaries: the normal dependencies, with the features of the packages.
    Build scripts are left out, since they only run during the build. Macros are kept: they generate code that is in the binaries."""
    edges = "normal" if with_macros else "normal,no-proc-macro"
    used = set()
    for package, features in [("gputrace", "objects,mcp"), ("gputrace-shim", "")]:
        tree = run("cargo", "tree", "--locked", "--package", package, "--features", features, "--edges", edges, "--target", f"{arch}-unknown-linux-gnu",
                   "--prefix", "none", "--no-dedupe", "--format", "{p}", cwd=ROOT)
        used |= {tuple(line.split()[:2]) for line in tree.splitlines()}
    known = json.loads(run("cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", f"{arch}-unknown-linux-gnu", "--features",
                           "gputrace/objects,gputrace/mcp", cwd=ROOT))["packages"]
    others = [package for package in known if package["source"] and (package["name"], f"v{package['version']}") in used]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def epoch():
    """The time stamp of every file, in seconds since 1970 (reproducible-builds.org/docs/source-date-epoch). It is the release date in the
    changelog, so that every build of a release has the same bytes. An unreleased version gets 1980-01-01, the earliest date that zip has."""
    if "SOURCE_DATE_EPOCH" in os.environ:
        return int(os.environ["SOURCE_DATE_EPOCH"])
    day = re.search(rf"(?m)^## {re.escape(version())} - (\d+-\d+-\d+)$", read(f"{ROOT}/CHANGELOG.md").decode())
    return calendar.timegm(time.strptime(day[1], "%Y-%m-%d")) if day else 315532800


def moment():
    return time.gmtime(EPOCH)[:6]


def run(*command, cwd=None):
    if shutil.which(command[0]) is None:
        sys.exit(f"pack.py: {command[0]} is not here (tests/setup.sh installs it)")
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", cwd=cwd)
    if result.returncode != 0:
        sys.exit(f"pack.py: {' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def read(path):
    with open(path, "rb") as file:
        return file.read()


EPOCH = epoch()
if __name__ == "__main__":
    main()

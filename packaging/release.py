#!/usr/bin/env python3
"""release.py [VERSION] [--dry]: everything of a release up to what a person does: tag and upload. It prints the commands of both.

The version is set, and everything built, in two copies of HEAD that lie in folders of their own. Their packages must be the same byte by
byte. Only then are the changed files put into the tree; `--dry` leaves the tree alone, and takes the next minor version unless one is named.
"""
import argparse
import datetime
import hashlib
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = f"{ROOT}/target/release-copies"

# Where a version stands: the file, and what surrounds it there. Locks are written apart.
PLACES = [
    ("Cargo.toml", '(?m)^version = "{}"$'),
    ("python/src/gputrace/__init__.py", '(?m)^__version__ = "{}"$'),
    ("docs/INSTALL.md", "(?m)^gputrace {}$"),
]
LOCKS = ["Cargo.lock", "fuzz/Cargo.lock"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version", nargs="?")
    parser.add_argument("--dry", action="store_true", help="leave the tree alone")
    arguments = parser.parse_args()
    old = current()
    new = arguments.version or (next_minor(old) if arguments.dry else "")
    checked(old, new, arguments.dry)
    copies = [copied(name) for name in ("one", "two/elsewhere")]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    for copy in copies:
        changed = set_version(copy, old, new, today)
    step("dependencies", ["make", "deny"], ROOT)
    has_arm = is_arm_here()
    for copy in copies:
        where = os.path.relpath(copy, ROOT)
        step(f"packages in {where}", ["make", "wheel", "dist", "deb", "sbom"], copy)
        if has_arm:
            step(f"packages for AArch64 in {where}", ["make", "arm-wheel", "arm-dist"], copy)
    packages = compared(*copies)
    summed(copies[0], packages)
    for wheel in glob_of(copies[0], ".whl"):
        step(f"metadata of {os.path.basename(wheel)}", [python(), f"{copies[0]}/packaging/metadata.py", wheel], copies[0], [77])
    out = f"{ROOT}/target/release-{new}"
    shutil.rmtree(out, ignore_errors=True)
    os.makedirs(out)
    for name in [*packages, "SHA256SUMS"]:
        shutil.copy(f"{copies[0]}/target/dist/{name}", out)
    if not arguments.dry:
        for file in changed:
            shutil.copyfile(f"{copies[0]}/{file}", f"{ROOT}/{file}")
    print(farewell(new, os.path.relpath(out, ROOT), packages, arguments.dry), flush=True)


def current():
    return re.search(r'(?m)^version = "(.*)"$', read(f"{ROOT}/Cargo.toml"))[1]


def next_minor(version):
    major, minor, _ = version.split(".")
    return f"{major}.{int(minor) + 1}.0"


def checked(old, new, is_dry):
    """Refuses before anything is built."""
    if not re.fullmatch(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)", new):
        sys.exit(f"release.py: a version is three numbers, as in VERSION={next_minor(old)}, and not {new!r}")
    if tuple(map(int, new.split("."))) <= tuple(map(int, old.split("."))):
        sys.exit(f"release.py: {new} is not greater than {old}, which Cargo.toml has")
    if said("git", "tag", "--list", f"v{new}"):
        sys.exit(f"release.py: the tag v{new} exists")
    changes = said("git", "status", "--porcelain")
    if changes and not is_dry:
        sys.exit(f"release.py: commit these first, or try with DRY=1:\n{changes}")
    if "## Unreleased" not in read(f"{ROOT}/CHANGELOG.md"):
        sys.exit("release.py: CHANGELOG.md has no section Unreleased")
    print(f"== {old} -> {new}, from {said('git', 'log', '-1', '--format=%h %s')}", flush=True)


def copied(name):
    """HEAD in a folder of its own, with the tools and the build of the last time."""
    copy = f"{FOLDER}/{name}"
    if not os.path.exists(f"{copy}/.git"):
        shutil.rmtree(copy, ignore_errors=True)
        os.makedirs(copy)
        run(["git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, copy], ROOT)
    run(["git", "fetch", "--quiet", "origin", said("git", "rev-parse", "HEAD")], copy)
    run(["git", "checkout", "--quiet", "--force", "--detach", "FETCH_HEAD"], copy)
    os.makedirs(f"{copy}/target", exist_ok=True)
    shutil.rmtree(f"{copy}/target/dist", ignore_errors=True)
    # The Debian for AArch64 is a gigabyte.
    for shared in ("tools", "arm"):
        os.makedirs(f"{ROOT}/target/{shared}", exist_ok=True)
        if not os.path.lexists(f"{copy}/target/{shared}"):
            os.symlink(f"{ROOT}/target/{shared}", f"{copy}/target/{shared}")
    return copy


def is_arm_here():
    """Whether packages for AArch64 can be made on this machine."""
    result = subprocess.run(["tests/arm/setup.sh", "target/arm"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode not in (0, 77):
        sys.exit(f"release.py: tests/arm/setup.sh ended with {result.returncode}: {result.stdout}")
    print(result.stdout.strip() or "== the Debian for AArch64 is there", flush=True)
    return result.returncode == 0


def set_version(copy, old, new, today):
    """In each place; files that have it in none are an error, and what changed is returned."""
    for file, pattern in PLACES:
        found = pattern.format(re.escape(old))
        text, count = re.subn(found, lambda match: match[0].replace(old, new), read(f"{copy}/{file}"))
        assert count == 1, f"{file}: {count} times {found}"
        write(f"{copy}/{file}", text)
    for file in LOCKS:
        blocks = read(f"{copy}/{file}").split("\n\n")
        # Ours have no source.
        ours = [at for at, block in enumerate(blocks) if f'\nversion = "{old}"' in block and "\nsource = " not in block]
        assert ours, f"{file} has no package of version {old}"
        for at in ours:
            blocks[at] = blocks[at].replace(f'\nversion = "{old}"', f'\nversion = "{new}"', 1)
        write(f"{copy}/{file}", "\n\n".join(blocks))
    text = read(f"{copy}/CHANGELOG.md").replace("## Unreleased\n", f"## Unreleased\n\n## {new} - {today}\n", 1)
    write(f"{copy}/CHANGELOG.md", text)
    # Fails if a lock is not what its workspace needs.
    for manifest in ("Cargo.toml", "fuzz/Cargo.toml"):
        run(["cargo", "metadata", "--quiet", "--locked", "--offline", "--no-deps", "--format-version", "1", "--manifest-path", manifest], copy)
    return [file for file, _ in PLACES] + LOCKS + ["CHANGELOG.md"]


def compared(one, other):
    """The names of the packages, which are the same bytes in both."""
    names = sorted(name for name in os.listdir(f"{one}/target/dist") if os.path.isfile(f"{one}/target/dist/{name}"))
    different = []
    for name in names:
        sums = [sha256(f"{copy}/target/dist/{name}") for copy in (one, other)]
        print(f"{'the same' if sums[0] == sums[1] else 'DIFFERENT'}: {sums[0]}  {name}", flush=True)
        different += [name] if sums[0] != sums[1] else []
    if different or len(names) < 4:
        sys.exit(f"release.py: two builds differ, or are not complete: {', '.join(different or names)}")
    return names


def summed(copy, packages):
    write(f"{copy}/target/dist/SHA256SUMS", "".join(f"{sha256(f'{copy}/target/dist/{name}')}  {name}\n" for name in packages))


def farewell(version, out, packages, is_dry):
    files = " ".join(f"{out}/{name}" for name in [*packages, "SHA256SUMS"])
    wheels = " ".join(f"{out}/{name}" for name in packages if name.endswith(".whl"))
    where = "the tree is as it was; without DRY=1 it would have the version set" if is_dry else "the version is set in the tree"
    return f"""
{len(packages)} files and their sums are in {out}; {where}.
By hand, once you have looked at them:

  git commit -am "Release {version}"
  git tag -s v{version} -m "gputrace {version}"
  git push origin main v{version}
  gh release create v{version} --title "gputrace {version}" {files}
  python3 -m twine upload {wheels}
"""


def step(what, command, folder, also_good=()):
    began = datetime.datetime.now()
    log = f"{FOLDER}/{re.sub('[^a-z0-9]+', '-', what.lower())}.log"
    with open(log, "w") as file:
        status = subprocess.run(command, cwd=folder, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL).returncode
    lines = read(log).strip().split("\n")
    if status != 0 and status not in also_good:
        sys.exit("\n".join(lines[-30:]) + f"\nrelease.py: {what}: {' '.join(command)} ended with {status} ({log})")
    notes = [line for line in lines if line.startswith(("SKIPPED", "target/dist/", "lintian", "advisories ok", "bans ok")) or "accepted by twine" in line]
    print(f"== {what}: {(datetime.datetime.now() - began).seconds} s", *notes, sep="\n   ", flush=True)


def python():
    """With twine, where tests/setup.sh could fetch it."""
    ours = f"{ROOT}/target/python/bin/python"
    return ours if os.path.exists(ours) else sys.executable


def glob_of(copy, end):
    return [f"{copy}/target/dist/{name}" for name in os.listdir(f"{copy}/target/dist") if name.endswith(end)]


def sha256(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


def run(command, folder):
    result = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if result.returncode != 0:
        sys.exit(f"release.py: {' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def said(*command):
    return run(command, ROOT).strip()


def read(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def write(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


if __name__ == "__main__":
    main()

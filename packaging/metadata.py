#!/usr/bin/env python3
"""metadata.py WHEEL: holds what the wheel says of itself against what the package index accepts, and against what python/pyproject.toml
becomes by its own build backend. Status 77: twine, build, flit_core or trove-classifiers is missing."""
import email
import os
import re
import subprocess
import sys
import zipfile

try:
    import build.util
    import flit_core  # noqa: F401 (the backend)
    import trove_classifiers
    import twine  # noqa: F401 (run as a program)
except ImportError as missing:
    print(f"SKIPPED: metadata of the wheel: {missing}")
    sys.exit(77)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MAY_BE = ("Project-URL", "Provides-Extra", "Requires-Dist", "Description-Content-Type")
NEEDED = ("Name", "Version", "Summary", "Keywords", "Author", "License-Expression", "Classifier", "Requires-Python")


def main():
    wheel = os.path.abspath(sys.argv[1])
    checked = subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [info] = [name for name in names if name.endswith(".dist-info/METADATA")]
        folder = os.path.dirname(info)
        ours = email.message_from_bytes(archive.read(info))
        points = archive.read(f"{folder}/entry_points.txt").decode()
    for field in NEEDED:
        assert ours[field], f"{field} is missing"
    unknown = set(ours.get_all("Classifier")) - trove_classifiers.classifiers
    assert not unknown, f"unknown classifiers: {sorted(unknown)}"
    missing = [file for file in ours.get_all("License-File") if f"{folder}/licenses/{file}" not in names]
    assert not missing, f"licences are missing: {missing}"
    built = build.util.project_wheel_metadata(f"{ROOT}/python", isolated=False)
    for field in (*NEEDED, *MAY_BE):
        one, other = (sorted(normal(value) for value in source.get_all(field, [])) for source in (ours, built))
        assert one == other, f"{field}: the wheel has {one}, and pyproject.toml gives {other}"
    description = built["Description"] or built.get_payload()
    assert normal(ours.get_payload()) == normal(description), "the descriptions differ"
    for name in re.findall(r"(?m)^\[(.*)\]$", points):
        assert name in ("console_scripts", "pytest11"), name
    print(f"{os.path.basename(wheel)}: {ours['Name']} {ours['Version']}, {len(ours.get_all('Classifier'))} classifiers, accepted by twine")


def normal(value):
    return re.sub(r"[\s()]", "", value).replace("'", '"')


main()

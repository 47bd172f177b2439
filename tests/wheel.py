#!/usr/bin/env python3
"""wheel.py SPEC DIR GLOB...: puts the members of a wheel that match into DIR, without fetching the rest of it.

A wheel of PyTorch has up to 2 GB, of which the oracle needs 5 MB, and the exports' tests one file. pip says where the wheel is; its directory and the wanted
members are then read by HTTP range requests. Exit status 77 where the package index cannot be reached.
"""
import fnmatch
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile

# WHEEL_MACHINE names another processor than this kind.
MACHINE = os.environ.get("WHEEL_MACHINE", "x86_64")
PLATFORMS = [f"{system}_{MACHINE}" for system in ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1")]
BLOCK = 1 << 20


class Remote(io.RawIOBase):
    """A file behind HTTP ranges, read in blocks of a megabyte that are kept."""

    def __init__(self, url):
        self.url, self.at, self.blocks = url, 0, {}
        first = self.fetch(0, 0)
        self.size = int(first.headers["Content-Range"].rsplit("/", 1)[1])

    def fetch(self, start, last):
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={start}-{last}"})
        for attempt in range(4):
            try:
                answer = urllib.request.urlopen(request, timeout=60)
                if answer.status != 206:
                    raise OSError(f"the server ignores ranges (status {answer.status})")
                return answer
            except OSError:
                if attempt == 3:
                    raise
                time.sleep(2**attempt)

    def block(self, index):
        if index not in self.blocks:
            start = index * BLOCK
            self.blocks[index] = self.fetch(start, min(start + BLOCK, self.size) - 1).read()
        return self.blocks[index]

    def seekable(self):
        return True

    def readable(self):
        return True

    def tell(self):
        return self.at

    def seek(self, offset, whence=io.SEEK_SET):
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def read(self, count=-1):
        end = self.size if count < 0 else min(self.size, self.at + count)
        parts = []
        while self.at < end:
            index, offset = divmod(self.at, BLOCK)
            part = self.block(index)[offset : offset + end - self.at]
            parts.append(part)
            self.at += len(part)
        return b"".join(parts)


def location(spec):
    """Where pip would fetch the wheel from."""
    with tempfile.TemporaryDirectory() as scratch:
        report = os.path.join(scratch, "report.json")
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps",
                   "--disable-pip-version-check", "--timeout", "30", "--retries", "2", "--only-binary", ":all:",
                   "--python-version", "3.11", "--target", os.path.join(scratch, "nowhere"), "--report", report, spec]
        for platform in PLATFORMS:
            command += ["--platform", platform]
        run = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        if run.returncode:
            unreachable = re.search("connection|resolve|timed out|proxy", run.stderr, re.IGNORECASE)
            said = (run.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise OSError("the package index cannot be reached" if unreachable else said)
        with open(report) as file:
            return json.load(file)["install"][0]["download_info"]["url"]


def main():
    spec, folder, *globs = sys.argv[1:]
    try:
        wheel = zipfile.ZipFile(Remote(location(spec)))
        members = [name for name in wheel.namelist() if any(fnmatch.fnmatch(name, glob) for glob in globs)]
        if not members:
            sys.exit(f"wheel.py: {spec} has nothing that matches {' '.join(globs)}")
        # In the order in which they lie there, so that no block is fetched twice.
        for member in sorted(members, key=lambda name: wheel.getinfo(name).header_offset):
            wheel.extract(member, folder)
    except OSError as error:
        print(f"skipped: {spec} cannot be fetched: {error}", file=sys.stderr)
        sys.exit(77)


main()

"""How much GPU memory a process held during a part of its life, from its trace."""
import json
import os
import re
import subprocess
import unicodedata
from collections import Counter

from ._installed import GputraceError, program_path

UNITS = {"": 1, "b": 1}
for power, letter in enumerate("kmgt", start=1):
    UNITS.update({letter: 1024**power, letter + "ib": 1024**power, letter + "b": 1000**power})

COLUMNS = ("time_ns", "action", "device", "kind", "addr", "bytes", "owner", "call_site", "device_bytes")


def parse_bytes(limit):
    """Bytes of `"2 GiB"`, `"512MB"` or a number."""
    if isinstance(limit, int):
        return limit
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(limit).lower())
    if match is None or match[2] not in UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f"{limit!r} is no amount of memory; write 1048576, '512 MiB' or '1.5 GB'")
    return int(float(match[1]) * UNITS[match[2]])


def show_bytes(amount):
    """1536 is `1.50 KiB`."""
    if amount < 1024:
        return f"{amount} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024:
            break
    return f"{amount:.2f} {unit}"


def printable(name):
    """A name as part of a line: what a terminal would obey, or draws nothing for, is spelled out, as gputrace itself does."""
    obeyed = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return "".join(f"\\u{{{ord(c):x}}}" if unicodedata.category(c) in obeyed else c for c in str(name))


class Usage:
    """What a process held between two moments, in nanoseconds of `time.monotonic_ns()`."""

    def __init__(self, trace, begin, end):
        process = json.loads(said("summary", "--json", trace))["processes"][0]
        self.pid = process["pid"]
        rows = (json.loads(line) for line in said("export", "--format", "jsonl", trace).split("\n") if line)
        self.changes = [tuple(map(row.get, COLUMNS)) for row in rows if row["device"] >= 0]
        self.begin, self.end = (moment - process["start_ns"] for moment in (begin, end))

    def peak(self):
        """The most bytes on one device in that time, the device, and who held them."""
        held, peak = {}, (0, None, 0)
        for index, (time, _, device, *_, device_bytes) in enumerate(self.changes):
            if time > self.end:
                break
            # Until the time begins only the last state counts: what was held then was there in it, too.
            if time < self.begin:
                held[device] = (device_bytes, device, index + 1)
            else:
                peak = max(peak, (device_bytes, device, index + 1), key=lambda state: state[0])
        amount, device, n_changes = max([peak, *held.values()], key=lambda state: state[0])
        return amount, device, self._holders(n_changes, device)

    def leaks(self):
        """What was allocated in that time and is still held at its end, by device, owner and call site."""
        return self._live([change for change in self.changes if change[0] <= self.end], self.begin)

    def _holders(self, n_changes, device):
        live = self._live(self.changes[:n_changes], None)
        return Counter({place: amount for place, amount in live.items() if place[0] == device})

    def _live(self, changes, since):
        """PyTorch's blocks and what others have of the driver. PyTorch's segments count where its blocks were not seen."""
        has_blocks = any(change[3] == "block" for change in self.changes)
        live = {}
        for time, action, device, kind, addr, amount, owner, site, _ in changes:
            if kind == "imported" or (has_blocks and kind != "block" and owner == "PyTorch"):
                continue
            # Physical memory and arrays have no address; any two of one size and call site are alike.
            key = (device, kind, addr) if addr else (device, kind, amount, site)
            if action == "alloc":
                live.setdefault(key, []).append((time, amount, owner, site))
            elif action == "free" and live.get(key):
                live[key].pop()
        places = Counter()
        for key, objects in live.items():
            for time, amount, owner, site in objects:
                if since is None or time >= since:
                    places[(key[0], owner, site)] += amount
        return places


def said(*arguments):
    """What gputrace writes on its standard output."""
    command = [program_path(), *arguments]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=without_preload())
    if result.returncode != 0:
        raise GputraceError(f"{' '.join(command)}: {result.stderr.strip()}")
    return result.stdout


def without_preload():
    """The environment without a preloaded libgputrace: gputrace itself is not to be traced."""
    entries = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    others = [entry for entry in entries if os.path.basename(entry) != "libgputrace.so"]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return dict(environment, LD_PRELOAD=":".join(others)) if others else environment

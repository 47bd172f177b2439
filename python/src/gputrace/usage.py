"""How much GPU memory a process held during a part of its life, from its trace."""
import collections
import json
import re
from typing import Any, Counter, Dict, Iterable, List, Optional, Tuple, Union

from ._run import lines, said

UNITS = {"": 1, "b": 1}
for power, letter in enumerate("kmgt", start=1):
    UNITS.update({letter: 1024**power, letter + "ib": 1024**power, letter + "b": 1000**power})

# Device, owner and call site.
Place = Tuple[int, str, str]
# By COLUMNS.
Change = Tuple[Any, ...]

COLUMNS = ("time_ns", "action", "device", "kind", "addr", "bytes", "owner", "call_site", "device_bytes")


def parse_bytes(limit: Union[int, str]) -> int:
    """Bytes of `"2 GiB"`, `"512MB"` or a number."""
    if isinstance(limit, int):
        return limit
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-z]*)\s*", str(limit).lower())
    if match is None or match[2] not in UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f"{limit!r} is no amount of memory; write 1048576, '512 MiB' or '1.5 GB'")
    return int(float(match[1]) * UNITS[match[2]])


class Usage:
    """What a process held between two moments, in nanoseconds of `time.monotonic_ns()`."""

    def __init__(self, trace: str, begin: int, end: int) -> None:
        process = json.loads(said("summary", "--json", trace))["processes"][0]
        self.pid: int = process["pid"]
        rows = map(json.loads, lines("export", "--format", "jsonl", trace))
        self.changes: List[Change] = [tuple(map(row.get, COLUMNS)) for row in rows if row["device"] >= 0]
        self.begin, self.end = (moment - process["start_ns"] for moment in (begin, end))

    def peak(self) -> Tuple[int, Optional[int], Counter[Place]]:
        """The most bytes on one device in that time, the device, and who held them."""
        held: Dict[int, Tuple[int, Optional[int], int]] = {}
        peak: Tuple[int, Optional[int], int] = (0, None, 0)
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

    def leaks(self) -> Counter[Place]:
        """What was allocated in that time and is still held at its end, by device, owner and call site."""
        return self._live([change for change in self.changes if change[0] <= self.end], self.begin)

    def _holders(self, n_changes: int, device: Optional[int]) -> Counter[Place]:
        live = self._live(self.changes[:n_changes], None)
        return collections.Counter({place: amount for place, amount in live.items() if place[0] == device})

    def _live(self, changes: Iterable[Change], since: Optional[int]) -> Counter[Place]:
        """PyTorch's blocks and what others have of the driver. PyTorch's segments count where its blocks were not seen."""
        has_blocks = any(change[3] == "block" for change in self.changes)
        live: Dict[Tuple[Any, ...], List[Tuple[int, int, str, str]]] = {}
        for time, action, device, kind, addr, amount, owner, site, _ in changes:
            if kind == "imported" or (has_blocks and kind != "block" and owner == "PyTorch"):
                continue
            # Physical memory and arrays have no address; any two of one size and call site are alike.
            key = (device, kind, addr) if addr else (device, kind, amount, site)
            if action == "alloc":
                live.setdefault(key, []).append((time, amount, owner, site))
            elif action == "free" and live.get(key):
                live[key].pop()
        places: Counter[Place] = collections.Counter()
        for key, objects in live.items():
            for time, amount, owner, site in objects:
                if since is None or time >= since:
                    places[(key[0], owner, site)] += amount
        return places

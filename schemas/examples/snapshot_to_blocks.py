"""Prints the blocks of a PyTorch memory snapshot (a pickle, plain or .gz) as examples/size.rs reads them.

    python3 snapshot_to_blocks.py snapshot.pickle.gz | cargo run --release -p gputrace-schemas --example size
"""

import gzip
import pickle
import random
import sys

path = sys.argv[1]
with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
    snapshot = pickle.load(file)
allocated = reserved = 0
noise = random.Random(1)
for trace in snapshot["device_traces"]:
    for entry in trace:
        action, addr, size = entry["action"], entry["addr"], entry["size"]
        # The snapshot's microseconds, with nanoseconds as a real clock would add them.
        time = entry["time_us"] * 1000 + noise.randrange(1000)
        if action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
        elif action == "alloc":
            allocated += size
            print("alloc", time, addr, size, allocated, reserved)
        elif action == "free_requested":
            allocated -= size
            print("free", time, addr, size, allocated, reserved)

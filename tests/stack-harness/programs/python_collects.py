"""What runs inside the collector of reference cycles is known to, and nothing else."""
import ctypes
import gc
import threading

library = ctypes.PyDLL(None)
# `CDLL` gives up the interpreter's lock for the call, as tensors do when they end.
unlocked = ctypes.CDLL(None)


class Ends:
    def __init__(self, seen, ask):
        self.seen = seen
        self.ask = ask

    def __del__(self):
        self.seen.append(self.ask())


def free_one(in_cycle, ask):
    seen = []
    ends = Ends(seen, ask)
    if in_cycle:
        ends.itself = ends
    del ends
    if in_cycle:
        assert seen == [], "the cycle keeps it"
        gc.collect()
    return seen


gc.disable()
for ask in (library.harness_is_collecting, unlocked.harness_is_collecting):
    assert free_one(False, ask) == [0]
    assert free_one(True, ask) == [1]
    assert ask() == 0, "after the collection"

# The collections that the interpreter starts by itself.
gc.enable()
gc.set_threshold(50)
seen = []
for _ in range(1000):
    ends = Ends(seen, unlocked.harness_is_collecting)
    ends.itself = ends
del ends
assert len(seen) > 500 and set(seen) == {1}, (len(seen), set(seen))
gc.collect()

answers = []
thread = threading.Thread(target=lambda: answers.append(free_one(True, unlocked.harness_is_collecting)))
thread.start()
thread.join()
assert answers == [[1]], answers
print("knows when it collects")

"""The part of PyTorch that a program of `gputrace reproduce` uses, on PyTorch's own compiled allocator without a GPU.

    PYTHONPATH=tests/oracle ORACLE=target/oracle/oracle-2.11.0 python3 repro.py

Every call goes to the harness (`harness.cpp`), which runs the allocator of that release on a stub of CUDA. ORACLE_MEMORY is the memory of the
device in bytes (80 GiB), ORACLE_DESCENDING=1 hands out addresses from above.
"""
import ctypes
import os
import signal
import subprocess

uint8 = "uint8"
__version__ = os.environ["ORACLE"].rsplit("-", 1)[1]
TOTAL = int(os.environ.get("ORACLE_MEMORY", 80 << 30))


signal.alarm(300)  # an oracle from before `live` answers nothing


class OutOfMemoryError(RuntimeError):
    pass


class Harness:
    def __init__(self):
        self.process = subprocess.Popen([os.environ["ORACLE"]], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True, bufsize=1)
        self.say(f"live {TOTAL} {0 if os.environ.get('ORACLE_DESCENDING') else 1}")

    def say(self, command):
        if not self.process.stdin.closed:  # as for tensors that outlive the program
            self.process.stdin.write(command + "\n")

    def ask(self, command):
        self.say(command)
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line or line.startswith(("error", "refused")):
            raise RuntimeError(f"the allocator ended: {line!r}")
        return line.rstrip("\n")

    def numbers(self):
        """Statistics by name: of all pools (current, peak, allocated, freed), then of the small and the large ones."""
        self.say("stats")
        found = {}
        while True:
            name, *values = self.answer().split()
            found[name] = [int(value) for value in values]
            if name == "stub_used":
                return found

    def segments(self):
        self.say("layout")
        self.say("stats")
        found, is_over = [], False
        while True:
            line = self.answer()
            # Statistics follow, of which one has the same name.
            is_over = is_over or line.startswith("allocation ")
            if line.startswith("segment ") and not is_over:
                _, address, *blocks = line.split()
                total = sum(int(block[:-1]) for block in blocks)
                found.append({"address": int(address, 16), "total_size": total})
            elif line.startswith("stub_used"):
                return found


harness = Harness()


class Tensor:
    count = 0

    def __init__(self, size):
        stream = cuda.current.index
        number, Tensor.count = Tensor.count, Tensor.count + 1
        said = harness.ask(f"alloc {number} {size} {stream}")
        if said.startswith("oom "):
            raise OutOfMemoryError(said.split(" ", 2)[2])
        self.number, self.address = number, int(said.split()[2], 16)

    def data_ptr(self):
        return self.address

    def record_stream(self, stream):
        harness.say(f"record {self.number} {stream.index}")

    def __del__(self):
        if hasattr(self, "number") and harness.process.poll() is None:
            harness.say(f"free {self.number}")


def empty(size, dtype=None, device=None):
    return Tensor(size)


class Stream:
    count = 0

    def __init__(self):
        Stream.count += 1
        self.index = Stream.count

    def synchronize(self):
        harness.say(f"finish {self.index}")


class ExternalStream(Stream):
    def __init__(self, handle):
        self.index = handle


class Cudart:
    @staticmethod
    def cudaStreamCreate(at):
        cuda.n_created += 1
        ctypes.c_size_t.from_address(at).value = 1000 + cuda.n_created
        return 0


class OnStream:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        self.before = cuda.current
        cuda.current = self.stream or cuda.current

    def __exit__(self, *_):
        cuda.current = self.before


class MemPool:
    """As in torch/csrc/cuda/MemPool.cpp: it holds its pool until it is deleted, and empties it then."""

    def __init__(self, allocator=None, use_on_oom=False, no_split=False):
        self.id = cuda.graph_pool_handle()
        harness.say(f"begin {self.id[1]}")
        harness.say(f"end {self.id[1]}")
        if use_on_oom:
            harness.say(f"overflow {self.id[1]}")
        if no_split:
            harness.say(f"whole {self.id[1]}")

    def __del__(self):
        if harness.process.poll() is None:
            harness.say(f"release {self.id[1]}")
            harness.say(f"trimpool {self.id[1]}")


class InPool:
    def __init__(self, pool):
        self.pool = pool

    def __enter__(self):
        harness.say(f"begin {self.pool.id[1]}")

    def __exit__(self, *_):
        harness.say(f"end {self.pool.id[1]}")
        harness.say(f"release {self.pool.id[1]}")


class cuda:
    OutOfMemoryError = OutOfMemoryError
    Stream = Stream
    ExternalStream = ExternalStream
    cudart = Cudart
    n_created = 0
    MemPool = MemPool
    n_pools = 0

    class Default:
        index = 0

    current = Default()

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def init():
        pass

    @staticmethod
    def mem_get_info():
        return TOTAL - harness.numbers()["stub_used"][0], TOTAL

    @staticmethod
    def set_per_process_memory_fraction(fraction):
        harness.say(f"fraction {fraction!r}")

    @staticmethod
    def stream(stream):
        return OnStream(stream)

    @staticmethod
    def use_mem_pool(pool):
        return InPool(pool)

    @staticmethod
    def graph_pool_handle():
        cuda.n_pools += 1
        return (0, cuda.n_pools)

    @staticmethod
    def empty_cache():
        harness.say("trim")

    @staticmethod
    def memory_snapshot():
        return harness.segments()

    @staticmethod
    def _sleep(_cycles):
        harness.say("done 0")

    @staticmethod
    def memory_reserved():
        return harness.numbers()["reserved_bytes"][0]

    @staticmethod
    def memory_allocated():
        return harness.numbers()["allocated_bytes"][0]

    @staticmethod
    def max_memory_reserved():
        return harness.numbers()["reserved_bytes"][1]

    @staticmethod
    def max_memory_allocated():
        return harness.numbers()["allocated_bytes"][1]


class _C:
    @staticmethod
    def _cuda_beginAllocateCurrentThreadToPool(_device, pool):
        harness.say(f"begin {pool[1]}")

    @staticmethod
    def _cuda_endAllocateToPool(_device, pool):
        harness.say(f"end {pool[1]}")

    @staticmethod
    def _cuda_releasePool(_device, pool):
        harness.say(f"release {pool[1]}")

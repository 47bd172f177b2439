"""Holds memory of the driver as its standard input says: `alloc BYTES`, `refused BYTES` (what the driver will not give), `free`, `step N BYTES` (an allocation that is kept, and one that is
not, in the range `step N`), and `quit`; answers each with `done`."""
import ctypes, sys

driver = ctypes.CDLL("libcuda.so.1")
context, held = ctypes.c_void_p(), []
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxSetCurrent(context) == 0


def alloc(n):
    address = ctypes.c_uint64()
    assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(n)) == 0
    held.append(address)


print("done", flush=True)
for line in sys.stdin:
    verb, *rest = line.split()
    if verb == "quit":
        break
    if verb == "alloc":
        alloc(int(rest[0]))
    elif verb == "refused":
        address = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(int(rest[0]))) == 2
    elif verb == "step":
        import gputrace

        with gputrace.range(f"step {rest[0]}"):
            alloc(int(rest[1]))
            alloc(1 << 20)
            assert driver.cuMemFree_v2(held.pop()) == 0
    else:
        assert driver.cuMemFree_v2(held.pop()) == 0
    print("done", flush=True)

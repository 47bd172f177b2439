"""An interpreter whose frames are not read, too old, too new or without a global lock: a mark that says so, native frames, no crash.

Usage: LD_PRELOAD=libstack_harness.so python3 python_declined.py STATUS
"""
import ctypes, sys, threading
library, released = ctypes.PyDLL(None), ctypes.CDLL(None)
library.harness_traceback.argtypes = [ctypes.c_void_p, ctypes.c_int]
status = library.harness_python_status()
assert status == int(sys.argv[1]), status


def capture():
    buffer = ctypes.create_string_buffer(1 << 16)
    n = library.harness_traceback(buffer, 1 << 16)
    marks, count, _ = buffer.raw[:n].decode().split("\t")
    assert int(marks, 16) & 32 and count == "0", buffer.raw[:n]
    for either in library, released:
        native = (ctypes.c_uint64 * 1024)()
        assert either.harness_native(native, 1024) > 5, "no native frames"
        assert either.harness_compare() == 1, "native frames differ from libgcc's"


def work():
    for _ in range(500): capture()


workers = [threading.Thread(target=work) for _ in range(4)]
for worker in workers: worker.start()
work()
for worker in workers: worker.join()
print("declined: Python", sys.version.split()[0])

"""An interpreter that is too old or too new: no frames, a mark that says so, and no crash."""
import ctypes
library = ctypes.PyDLL(None)
library.harness_traceback.argtypes = [ctypes.c_void_p, ctypes.c_int]
assert library.harness_python_status() == 4
buffer = ctypes.create_string_buffer(1 << 16)
n = library.harness_traceback(buffer, 1 << 16)
marks, count, _ = buffer.raw[:n].decode().split("\t")
assert int(marks, 16) & 32 and count == "0", buffer.raw[:n]
print("declined")

"""What the Python programs of the torture share: `work(n)` as in torture.h, called without the GIL or with it."""

import ctypes
import os
import sys

ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
_free = ctypes.CDLL(sys.argv[1])
_held = ctypes.PyDLL(sys.argv[1])
for _library in (_free, _held):
    _library.torture_work.argtypes = [ctypes.c_long]
    _library.torture_work.restype = ctypes.c_long


def begin():
    _free.torture_begin()


def work(n, with_gil=False):
    return (_held if with_gil else _free).torture_work(n)


def forked():
    _free.torture_forked()


os.register_at_fork(after_in_child=forked)

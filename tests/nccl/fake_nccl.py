"""One rank of a job without a GPU: the stand-in for NCCL through ctypes. README.md beside this file has an example.

Every function raises `NcclError` where NCCL answers anything but success or "in progress".
"""

import contextlib
import ctypes
import glob
import hashlib
import os

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))

# ncclDataType_t and ncclRedOp_t, nccl.h 2.28.
INT8, UINT8, INT32, UINT32, INT64, UINT64, HALF, FLOAT, DOUBLE, BFLOAT16 = range(10)
SUM, PROD, MAX, MIN, AVG = range(5)
# ncclResult_t.
SUCCESS, IN_PROGRESS = 0, 7

_cuda = ctypes.CDLL("libcuda.so.1")
_nccl = ctypes.CDLL("libnccl.so.2")
_pointer = ctypes.c_void_p
_size = ctypes.c_size_t


class NcclError(RuntimeError):
    """What NCCL answered."""

    def __init__(self, function, result):
        super().__init__(f"{function}: {result}")
        self.result = result


class UniqueId(ctypes.Structure):
    """`ncclUniqueId`."""

    _fields_ = [("internal", ctypes.c_char * 128)]


class Config(ctypes.Structure):
    """`ncclConfig_t` of 2.27."""

    _fields_ = [
        ("size", _size),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
        ("collnet_enable", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
    ]


_UNDEFINED = -(2**31)


def config(name=None, blocking=None):
    """A configuration that leaves all else to NCCL."""
    made = Config(ctypes.sizeof(Config), 0xCAFEBEEF, 22700)
    for field, kind in Config._fields_[3:]:
        if kind is ctypes.c_int:
            setattr(made, field, _UNDEFINED)
    if name is not None:
        made.comm_name = name.encode()
    if blocking is not None:
        made.blocking = blocking
    return made


def _call(function, *arguments):
    result = getattr(_nccl, function)(*arguments)
    if result not in (SUCCESS, IN_PROGRESS):
        raise NcclError(function, result)
    return result


def _context(device):
    """Makes the primary context of a device current, as the CUDA runtime would."""
    context = _pointer()
    assert _cuda.cuInit(0) == 0
    assert _cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert _cuda.cuCtxSetCurrent(context) == 0


def allocate(nbytes):
    """Device memory of the program's own; its address."""
    address = ctypes.c_uint64()
    assert _cuda.cuMemAlloc_v2(ctypes.byref(address), _size(nbytes)) == 0
    return address.value


def free(address):
    """Gives memory of `allocate` back."""
    assert _cuda.cuMemFree_v2(ctypes.c_uint64(address)) == 0


def unique_id(name):
    """The same id in all ranks of a job, without asking anybody."""
    job = os.environ.get("FAKE_NCCL_JOB", "")
    made = UniqueId()
    digest = hashlib.sha512(f"{job}/{name}".encode()).digest()
    ctypes.memmove(ctypes.byref(made), digest * 2, 128)
    return made


def enough():
    """Has `launch.py` kill what still runs of the job."""
    open(f"/dev/shm/fake-nccl.{os.environ['FAKE_NCCL_JOB']}.enough", "w").close()


def made(rank):
    """Collectives that a rank has made, of a job with one communicator: `struct meeting` in fake-cuda/nccl_meet.h."""
    (path,) = glob.glob(f"/dev/shm/fake-nccl.{os.environ['FAKE_NCCL_JOB']}.*")
    with open(path, "rb") as file:
        file.seek(8 + 8 * rank)
        return int.from_bytes(file.read(8), "little")


def init(name="world", n_ranks=None, rank=None, device=0, comm_name=None, blocking=None):
    """`ncclCommInitRank`, or `ncclCommInitRankConfig` where something is to be configured."""
    _context(device)
    handle = _pointer()
    n_ranks = WORLD if n_ranks is None else n_ranks
    rank = RANK if rank is None else rank
    if comm_name is None and blocking is None:
        _call("ncclCommInitRank", ctypes.byref(handle), n_ranks, unique_id(name), rank)
    else:
        wanted = config(comm_name, blocking)
        _call("ncclCommInitRankConfig", ctypes.byref(handle), n_ranks, unique_id(name), rank, ctypes.byref(wanted))
    return Comm(handle)


@contextlib.contextmanager
def group():
    """`ncclGroupStart` and `ncclGroupEnd`."""
    _call("ncclGroupStart")
    yield
    _call("ncclGroupEnd")


@contextlib.contextmanager
def simulated_group():
    """A group that NCCL only estimates."""
    _call("ncclGroupStart")
    yield
    _call("ncclGroupSimulateEnd", None)


def mem_alloc(nbytes):
    """`ncclMemAlloc`; the address."""
    address = _pointer()
    _call("ncclMemAlloc", ctypes.byref(address), _size(nbytes))
    return address.value


def mem_free(address):
    """`ncclMemFree`."""
    _call("ncclMemFree", _pointer(address))


class Comm:
    """A communicator. Buffers are addresses that nobody reads; streams are any numbers."""

    def __init__(self, handle):
        self.handle = handle

    def rank(self):
        """Rank in it."""
        number = ctypes.c_int()
        _call("ncclCommUserRank", self.handle, ctypes.byref(number))
        return number.value

    def count(self):
        """Ranks in it."""
        number = ctypes.c_int()
        _call("ncclCommCount", self.handle, ctypes.byref(number))
        return number.value

    def _collective(self, function, count, dtype, *kinds, send=0x1000, recv=0x2000, stream=0):
        buffers = (_pointer(send), _pointer(recv), _size(count), dtype)
        return _call(function, *buffers, *kinds, self.handle, _pointer(stream))

    def all_reduce(self, count, dtype=FLOAT, op=SUM, **where):
        """`ncclAllReduce`."""
        return self._collective("ncclAllReduce", count, dtype, op, **where)

    def broadcast(self, count, dtype=FLOAT, root=0, **where):
        """`ncclBroadcast`."""
        return self._collective("ncclBroadcast", count, dtype, root, **where)

    def reduce(self, count, dtype=FLOAT, op=SUM, root=0, **where):
        """`ncclReduce`."""
        return self._collective("ncclReduce", count, dtype, op, root, **where)

    def all_gather(self, count, dtype=FLOAT, **where):
        """`ncclAllGather`."""
        return self._collective("ncclAllGather", count, dtype, **where)

    def reduce_scatter(self, count, dtype=FLOAT, op=SUM, **where):
        """`ncclReduceScatter`."""
        return self._collective("ncclReduceScatter", count, dtype, op, **where)

    def all_to_all(self, count, dtype=FLOAT, **where):
        """`ncclAlltoAll`."""
        return self._collective("ncclAlltoAll", count, dtype, **where)

    def gather(self, count, dtype=FLOAT, root=0, **where):
        """`ncclGather`."""
        return self._collective("ncclGather", count, dtype, root, **where)

    def scatter(self, count, dtype=FLOAT, root=0, **where):
        """`ncclScatter`."""
        return self._collective("ncclScatter", count, dtype, root, **where)

    def send(self, count, peer, dtype=FLOAT, buffer=0x1000, stream=0):
        """`ncclSend`."""
        return _call("ncclSend", _pointer(buffer), _size(count), dtype, peer, self.handle, _pointer(stream))

    def recv(self, count, peer, dtype=FLOAT, buffer=0x2000, stream=0):
        """`ncclRecv`."""
        return _call("ncclRecv", _pointer(buffer), _size(count), dtype, peer, self.handle, _pointer(stream))

    def split(self, color, key=None, name=None, blocking=None):
        """`ncclCommSplit`; `None` for color -1."""
        handle = _pointer()
        key = RANK if key is None else key
        wanted = None if name is None and blocking is None else ctypes.byref(config(name, blocking))
        _call("ncclCommSplit", self.handle, color, key, ctypes.byref(handle), wanted)
        return Comm(handle) if color >= 0 else None

    def shrink(self, excluded, flags=0):
        """`ncclCommShrink`."""
        handle = _pointer()
        ranks = (ctypes.c_int * len(excluded))(*excluded)
        _call("ncclCommShrink", self.handle, ranks, len(excluded), ctypes.byref(handle), None, flags)
        return Comm(handle)

    def redop(self, dtype=FLOAT):
        """`ncclRedOpCreatePreMulSum` with a scalar of the host."""
        made, scalar = ctypes.c_int(), ctypes.c_double(0.5)
        _call("ncclRedOpCreatePreMulSum", ctypes.byref(made), ctypes.byref(scalar), dtype, 1, self.handle)
        return made.value

    def redop_destroy(self, op):
        """`ncclRedOpDestroy`."""
        _call("ncclRedOpDestroy", op, self.handle)

    def register(self, address, nbytes):
        """`ncclCommRegister`; the registration."""
        handle = _pointer()
        _call("ncclCommRegister", self.handle, _pointer(address), _size(nbytes), ctypes.byref(handle))
        return handle.value

    def deregister(self, handle):
        """`ncclCommDeregister`."""
        _call("ncclCommDeregister", self.handle, _pointer(handle))

    def async_error(self):
        """`ncclCommGetAsyncError`."""
        error = ctypes.c_int()
        _call("ncclCommGetAsyncError", self.handle, ctypes.byref(error))
        return error.value

    def wait(self):
        """Waits, as for a stream, until everything that was called is complete."""
        _call("fakeNcclWait", self.handle)

    def finalize(self):
        """`ncclCommFinalize`."""
        _call("ncclCommFinalize", self.handle)

    def destroy(self):
        """`ncclCommDestroy`."""
        _call("ncclCommDestroy", self.handle)

    def abort(self):
        """`ncclCommAbort`."""
        _call("ncclCommAbort", self.handle)

    def revoke(self):
        """`ncclCommRevoke`."""
        _call("ncclCommRevoke", self.handle, 0)

"""Marks and ranges of the program in its trace, as NVTX gives them, without NVTX.

Code with NVTX in it loads the library that NVTX_INJECTION64_PATH names, and hands it tables of functions to fill in (NVTX 3,
nvtxTypes.h and nvtxInitDefs.h). So does this, once, when the first mark comes. Where nobody listens, marks do nothing.
"""
import ctypes
import functools
import os
import threading
from typing import Any, Callable, Optional, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

_numbers = range
# NVTX_ETID_CALLBACKS, NVTX_CB_MODULE_CORE, and of NvtxCallbackIdCore: nvtxMarkA, nvtxRangePushA, nvtxRangePop.
_CALLBACKS, _CORE = 1, 1
_MARK, _PUSH, _POP = 2, 9, 11
_N_CORE = 16


class _ExportTable(ctypes.Structure):
    """NvtxExportTableCallbacks."""

    _get_table = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint)
    )
    _fields_ = [("size", ctypes.c_size_t), ("get_table", _get_table)]


class _Tables:
    """What a listener fills in, and keeps for as long as the process lives."""

    def __init__(self) -> None:
        self.core = (ctypes.c_void_p * _N_CORE)()
        slot, start = ctypes.sizeof(ctypes.c_void_p), ctypes.addressof(self.core)
        self.slots = (ctypes.c_void_p * _N_CORE)(None, *[start + index * slot for index in _numbers(1, _N_CORE)])
        self.table = _ExportTable(ctypes.sizeof(_ExportTable), _ExportTable._get_table(self.get))
        self.export = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint)(
            lambda kind: ctypes.addressof(self.table) if kind == _CALLBACKS else None
        )

    def get(self, module: int, table: Any, size: Any) -> int:
        if module != _CORE:
            return 0
        table[0], size[0] = ctypes.addressof(self.slots), _N_CORE
        return 1

    def function(self, index: int, result: Any, *arguments: Any) -> Optional[Callable[..., Any]]:
        address = self.core[index]
        return ctypes.CFUNCTYPE(result, *arguments)(address) if address else None



class _Listener:
    """The functions of who listens, or none."""

    lock = threading.Lock()
    known: Optional["_Listener"] = None

    def __init__(self) -> None:
        self.mark = self.push = self.pop = None
        attach = self._injection()
        if attach is None:
            return
        self.tables = _Tables()
        attach.restype = ctypes.c_int
        if attach(self.tables.export):
            self.mark = self.tables.function(_MARK, None, ctypes.c_char_p)
            self.push = self.tables.function(_PUSH, ctypes.c_int, ctypes.c_char_p)
            self.pop = self.tables.function(_POP, ctypes.c_int)

    @staticmethod
    def _injection() -> Any:
        """The tool that the environment names, as NVTX would take it; else libgputrace.so where it was preloaded by hand."""
        try:
            return ctypes.CDLL(os.environ.get("NVTX_INJECTION64_PATH") or None).InitializeInjectionNvtx2
        except (OSError, AttributeError):
            return None

    @classmethod
    def get(cls) -> "_Listener":
        if cls.known is None:
            with cls.lock:
                if cls.known is None:
                    cls.known = cls()
        return cls.known


def _text(text: object) -> bytes:
    # A C string ends at the first zero.
    return str(text).replace("\0", " ").encode("utf-8", "replace")


def mark(text: object) -> None:
    """Puts a mark into the trace: something happened now."""
    say = _Listener.get().mark
    if say is not None:
        say(_text(text))


class range:  # noqa: A001 (named as in `torch.cuda.nvtx.range`)
    """A range of this thread: `with gputrace.range("step 3"): ...`, or a decorator. Ranges nest."""

    def __init__(self, text: object) -> None:
        self.text = text

    def __enter__(self) -> "range":
        push = _Listener.get().push
        if push is not None:
            push(_text(self.text))
        return self

    def __exit__(self, *_: object) -> None:
        pop = _Listener.get().pop
        if pop is not None:
            pop()

    def __call__(self, function: _Function) -> _Function:
        @functools.wraps(function)
        def within(*arguments: Any, **named: Any) -> Any:
            with self:
                return function(*arguments, **named)

        return within  # type: ignore[return-value]

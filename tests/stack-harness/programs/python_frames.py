"""Compares every captured Python frame with the interpreter's own, in many situations. Exit code 1 on a difference.

Usage: LD_PRELOAD=libstack_harness.so python3 python_frames.py [REDEFINITIONS]
"""
import asyncio, contextlib, ctypes, os, sys, threading, traceback

HAS_QUALNAME = sys.version_info >= (3, 11)
ROOM = 1 << 20
held, released = ctypes.PyDLL(None), ctypes.CDLL(None)  # with the GIL, and without
for library in held, released:
    library.harness_traceback.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.harness_python_id.restype = ctypes.c_uint64
local = threading.local()
lock = threading.RLock()  # signal handlers check too
n_stacks, n_frames, failures, unfit = 0, 0, [], []
fits = {"whole"}


def name_of(code):
    return code.co_qualname if HAS_QUALNAME else code.co_name


def expected(frame):
    """The interpreter's own view from `frame` on, innermost first."""
    frames = []
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, name_of(frame.f_code)))
        frame = frame.f_back
    return frames


def captured(library):
    if not hasattr(local, "buffers"): local.buffers = []
    # A signal handler that comes in between takes another one.
    buffer = local.buffers.pop() if local.buffers else ctypes.create_string_buffer(ROOM)
    n = library.harness_traceback(buffer, ROOM)
    assert n > 0
    head, *lines = ctypes.string_at(buffer, n).decode().splitlines()
    local.buffers.append(buffer)
    marks, count, fit = head.split("\t")
    frames = [(f, int(l), q) for f, l, q in (line.split("\t") for line in lines)]
    assert len(frames) == int(count)
    if fit not in fits: unfit.append((fit, frames[:4]))
    return int(marks, 16), frames[1:]  # without this function


def check(situation, library=held, known=None):
    # Called on one line of the tested code; compares from its caller on.
    global n_stacks, n_frames
    want = expected(sys._getframe(1)) if known is None else known
    marks, got = captured(library)
    got = got[1:]  # without `check`
    if marks & 16:
        want = want[: len(got)]
    with lock:
        n_stacks += 1
        n_frames += len(want)
        if got != want or marks & 32:
            failures.append((situation, marks, want, got))


def both(situation):
    check(situation, held, expected(sys._getframe(1))and None)
    check(situation, released)


def plain():
    both("plain")
    for i in range(3):
        check("loop", held); check("loop", released)
    x = [check("comprehension", held) for _ in range(2)]
    (lambda: check("lambda", released))()

    class Inner:
        check("class body", held)
        def method(self): check("method", held)
        @property
        def value(self): return check("property", released)
    Inner().method(); Inner().value


def recursion(n, library, situation="recursion"):
    if n == 0: return check(situation, library)
    return recursion(n - 1, library, situation)


def either_way():
    import functools
    def leaf(*_): check("called by Python or C", held)
    for _ in range(3):
        leaf(); functools.reduce(leaf, [1, 2]); leaf(); leaf(); functools.reduce(leaf, [1, 2])


def collections():
    """The collector runs wherever something is made, in functions that are only being set up too."""
    import gc
    class Cycle:
        def __init__(self): self.itself = self
        def __del__(self): check("finalizer of a cycle", held); check("finalizer of a cycle", released)
    def cells(n):
        first, second = [n], [n]
        def inner(): return first, second
        yield inner
    before = gc.get_threshold()
    gc.set_threshold(2)
    for n in range(100):
        Cycle(); list(cells(n)); recursion(1, held, "between collections"); [f() for f in cells(n)]
    gc.set_threshold(*before); gc.collect()


def generators():
    def numbers(n):
        for i in range(n):
            check("generator", held); check("generator", released)
            yield i
    def outer(n):
        yield from numbers(n)
    for _ in outer(3): check("beside a generator", held)
    list(x for x in outer(2)); sum(map(lambda v: check("map", released) or v, outer(2)))
    suspended = [outer(2) for _ in range(3)]
    for g in suspended: next(g)
    for g in reversed(suspended): next(g, None)
    def last_words():
        try: yield
        except KeyError: check("thrown into", held); yield
        finally: check("closed", released)
    g = last_words(); next(g); g.throw(KeyError()); g.close()
    def deep_one(n):
        if n: yield from deep_one(n - 1)
        check("delegated", held); check("delegated", released); yield n
    list(deep_one(20))


def callbacks():
    class Less:
        def __lt__(self, other): check("called by sort", held); return True
        def __hash__(self): check("called by hash", released); return 1
        def __eq__(self, other): check("called by eq", held); return False
        def __del__(self): check("finalizer", held)
    sorted([Less(), Less(), Less()]); {Less(): 1, Less(): 2}
    FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    def compare(a, b): check("called by qsort", held); check("called by qsort", released); return 0
    array = (ctypes.c_int * 4)(4, 3, 2, 1)
    released.qsort(array, 4, 4, FUNCTION(compare))
    import functools, re
    functools.reduce(lambda a, b: check("reduce", held), range(3))
    re.sub("a", lambda m: check("called by re", released) or "b", "aa")
    functools.partial(recursion, 3, held, "partial")()
    exec(compile("\n\ncheck('exec', held)", "<text>", "exec"), globals())
    eval("check('eval', released)")
    try: raise ValueError
    except ValueError: check("handler", held)
    finally: check("finally", released)
    with contextlib.ExitStack() as stack: stack.callback(check, "exit stack", held)


async def coroutines():
    async def leaf(n):
        check("coroutine", held); await asyncio.sleep(0); check("coroutine", released)
        return n
    async def stream():
        for i in range(2): yield await leaf(i)
    async for _ in stream(): check("async for", held)
    class Manager:
        async def __aenter__(self): check("async with", held); await leaf(1)
        async def __aexit__(self, *_): await leaf(2); check("async with", released)
    async with Manager(): check("inside of async with", held)
    async def nested(n):
        if n: return await nested(n - 1)
        return await asyncio.wait_for(leaf(0), 10)
    await asyncio.gather(nested(10), asyncio.create_task(nested(3)))
    asyncio.get_running_loop().call_soon(check, "callback of the loop", held)
    await asyncio.sleep(0); await asyncio.sleep(0)
    await asyncio.gather(*(leaf(i) for i in range(4)))
    await asyncio.get_running_loop().run_in_executor(None, recursion, 5, released, "executor")


def threads():
    def work(n):
        for _ in range(100): recursion(n, held, "thread"); recursion(n + 3, released, "thread")
    workers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for w in workers: w.start()
    for w in workers: w.join()
    START = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    def foreign(_): check("thread made in C", held); check("thread made in C", released); return None
    start, tid = START(foreign), ctypes.c_ulong()
    libc = ctypes.CDLL(None)
    libc.pthread_create(ctypes.byref(tid), None, start, None)
    libc.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
    libc.pthread_join(tid, None)


def greenlets():
    try: import greenlet
    except ImportError: return print("skipped: greenlet is not installed for this interpreter")
    def ping(n): check("greenlet", held); other.switch(n); recursion(2, released, "greenlet")
    def pong(n): check("other greenlet", released); main.switch()
    def switch():
        global main, other
        main = greenlet.getcurrent()
        one, other = greenlet.greenlet(ping), greenlet.greenlet(pong)
        one.switch(1); check("between greenlets", held); one.switch()
    def numbers():
        for i in range(3): check("generator in a greenlet", held); main.switch(i); check("resumed", released); yield i
    def outlives(n): return outlives(n - 1) if n else keep.switch()
    # Before 3.12 an interpreter frame is told by its function: those of whoever started the greenlet lie further out on
    # the same part of the C stack.
    if sys.version_info < (3, 12): fits.add("inner")
    switch()
    inside = greenlet.greenlet(lambda: list(numbers()))
    while not inside.dead: recursion(2, held, "beside a greenlet"); inside.switch()
    # Whoever started it is long gone when it goes on.
    keep = greenlet.greenlet(lambda: (check("started deep", held), main.switch(), recursion(9, held, "goes on"), recursion(9, released, "goes on")))
    outlives(40); recursion(30, held, "between greenlets"); keep.switch()
    worker = threading.Thread(target=switch); worker.start(); worker.join()
    fits.discard("inner")


def deep():
    sys.setrecursionlimit(5000)
    for depth in 100, 480, 700, 2000, 499, 100:
        recursion(depth, held, "deep"); recursion(depth, held, "deep"); recursion(depth, released, "deep")
    marks, frames = deep_marks(600)
    assert marks & 16, "a cut stack is not marked"
    marks, frames = deep_marks(100)
    assert not marks & 16, "a whole stack is marked as cut"


def deep_marks(n):
    return deep_marks(n - 1) if n else captured(held)


def redefinitions(n):
    """Functions that live for a moment: the next one gets the same addresses."""
    scope = {"check": check, "held": held, "released": released}
    for i in range(n):
        pad = "\n" * (i * 7 % 23)
        body = "  x = 1\n" * (i * 5 % 7)
        which = "held" if i % 3 else "released"
        source = f"{pad}def f{i * 11 % 31}(a=0):\n{body}  check('redefinition', {which})\n{body}\nf{i * 11 % 31}()\n"
        exec(compile(source, f"<generated {i * 13 % 17}>", "exec"), scope)


def same_shape(n):
    """The same name, file, first line and length of the line table, over and over: only inner lines differ."""
    scope = {"check": check, "held": held}
    lines = ["  x = 1\n"] * 40
    for i in range(n):
        body = list(lines); body[5 + i * 7 % 30] = "  x = (\n 1)\n"
        body.insert(38 - i % 20, "  check('same shape', held)\n")
        exec(compile("def f():\n" + "".join(body) + "f()\n", "<same>", "exec"), scope)
    for size in 8, 12, 16, 24, 40:
        for i in range(n):
            body = lines[:size]; body.insert(size // 2, "  check('same shape', held)\n"); body.insert(1 + i * 7 % size, "\n")
            exec(compile("def f():\n" + "".join(body) + "f()\n", "<same>", "exec"), scope)


def subinterpreters():
    code = f"""
import sys, ctypes
held = ctypes.PyDLL(None)
held.harness_traceback.argtypes = [ctypes.c_void_p, ctypes.c_int]
buffer = ctypes.create_string_buffer({ROOM})
def inner():
    n = held.harness_traceback(buffer, {ROOM}); return n
def outer():
    n = inner()
    names = [line.split("\\t")[2] for line in buffer.raw[:n].decode().splitlines()[1:]]
    assert names == ["inner", "outer", "<module>"], names
outer(); outer()
"""
    def run():
        if sys.version_info >= (3, 14):
            i = interpreters.create(); i.exec(code); i.close()
        elif sys.version_info >= (3, 13):
            i = interpreters.create("legacy"); error = interpreters.exec(i, code); assert error is None, error; interpreters.destroy(i)
        else:
            arguments = {"isolated": False} if sys.version_info >= (3, 10) else {}
            i = interpreters.create(**arguments); interpreters.run_string(i, code); interpreters.destroy(i)
        done.append(i)
    try:
        if sys.version_info >= (3, 14): from concurrent import interpreters
        elif sys.version_info >= (3, 13): import _interpreters as interpreters
        else: import _xxsubinterpreters as interpreters
    except ImportError as e:
        return print("skipped: no subinterpreters:", e)
    done = []
    for _ in range(3): run(); check("between subinterpreters", held)
    workers = [threading.Thread(target=run) for _ in range(3)]
    for w in workers: w.start(); check("beside subinterpreters", released)
    for w in workers: w.join()
    assert len(done) == 6, "a subinterpreter failed"
    check("after subinterpreters", held)


def ids():
    one = [held.harness_python_id() for _ in range(3)]
    assert one[0] and len(set(one)) == 1, one
    two = held.harness_python_id()
    assert two != one[0]


if __name__ == "__main__":
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    status = held.harness_python_status()
    assert status == 1, f"status {status}"
    for situation in plain, either_way, collections, generators, callbacks, threads, greenlets, ids, deep, subinterpreters:
        situation()
    asyncio.run(coroutines())
    redefinitions(n); same_shape(n // 4)
    assert not unfit, f"{len(unfit)} stacks whose native frames do not fit, first {unfit[0]}"
    print(f"Python {sys.version.split()[0]}: {n_stacks} stacks, {n_frames} frames, {len(failures)} stacks wrong")
    for situation, marks, want, got in failures[:3]:
        print(f"  {situation}, marks {marks:#x}: {len(want)} frames expected, {len(got)} found")
        for pair in zip(want, got):
            if pair[0] != pair[1]: print("   expected", pair[0], "found", pair[1]); break
        for side, frames in ("expected", want), ("found", got): print("   ", side, frames[:6])
    sys.exit(1 if failures else 0)

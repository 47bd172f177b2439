"""Asks the driver for memory in many ways of running Python.

Prints JSON: of each request, by its bytes, the Python frames as the interpreter says them, innermost first; and what the interpreter is.
"""
import asyncio, ctypes, json, sys, sysconfig, threading

driver = ctypes.CDLL("libcuda.so.1")
said, sizes = {}, iter(range(1 << 20, 1 << 30, 4096))


def frames(frame):
    found = []
    while frame is not None:
        code = frame.f_code
        name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
        found.append([code.co_filename, frame.f_lineno, name])
        frame = frame.f_back
    return found


def ask():
    n, address = next(sizes), ctypes.c_uint64()
    said[n] = frames(sys._getframe()); driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(n))
    driver.cuMemFree_v2(address)


def generator(depth):
    ask()
    if depth:
        yield from generator(depth - 1)
    yield ask()


async def coroutine():
    ask()
    await asyncio.sleep(0)
    ask()


async def coroutines():
    await asyncio.gather(coroutine(), coroutine())
    await asyncio.get_running_loop().run_in_executor(None, ask)


def greenlets():
    try:
        import greenlet
    except ImportError:
        return
    main = greenlet.getcurrent()
    def run():
        ask(); main.switch(); ask()
    other = greenlet.greenlet(run)
    other.switch()
    ask()
    other.switch()


def in_thread():
    driver.cuCtxSetCurrent(context)
    list(generator(1))


context = ctypes.c_void_p()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert driver.cuCtxSetCurrent(context) == 0
ask()
list(generator(3))
asyncio.run(coroutines())
greenlets()
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
is_free_threaded = sysconfig.get_config_var("Py_GIL_DISABLED") == 1
print(json.dumps({"minor": sys.version_info[1], "is_free_threaded": is_free_threaded, "said": said}))

#!/usr/bin/env python3
"""What the driver answers when it is asked for its functions: is each answer a function that it exports?

usage: probe.py [CUDART.SO ...]

gputrace chooses its stand-in for a function by the address that the driver gives out, so an address that is no export would be a
function it cannot know. Every exported function is asked for by its base name, in all versions and for all default streams, of
cuGetProcAddress and cuGetProcAddress_v2; and CUDA runtimes (those named, or those of installed packages) for one of them. Under
gputrace the same must hold: its answers are functions that libgputrace.so exports. PASS and FAIL lines.
"""
import ctypes as C, glob, os, re, struct, sys

VERSIONS = (2000, 2020, 3020, 4000, 4010, 5000, 5050, 6000, 6050, 7000, 8000, 9000, 9020, 10000, 10010, 10020, 11000, 11010, 11020, 11030,
            11040, 11050, 11060, 11070, 11080, 12000, 12010, 12020, 12030, 12040, 12050, 12060, 12080, 12090, 13000, 13010, 13020, 13040)
SUFFIX = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")


def exports(path):
    """Functions that a 64-bit ELF file exports."""
    data = open(path, "rb").read()
    sections, size, n = struct.unpack_from("<Q", data, 0x28)[0], *struct.unpack_from("<HH", data, 0x3a)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, sections + size * i) for i in range(n)]
    names = set()
    for header in headers:
        if header[1] != 11: continue  # SHT_DYNSYM
        strings = headers[header[6]][4]
        for at in range(header[4], header[4] + header[5], 24):
            name, info, _, index, value = struct.unpack_from("<IBBHQ", data, at)
            if index and value and info & 15 == 2:  # a defined STT_FUNC
                end = data.index(b"\0", strings + name)
                names.add(data[strings + name:end].decode())
    return names


def mapped(name):
    for line in open("/proc/self/maps"):
        path = line.split()[-1]
        if os.path.basename(path).startswith(name): return path


def main():
    cuda = C.CDLL("libcuda.so.1")
    dlsym = C.CDLL(None).dlsym
    dlsym.restype, dlsym.argtypes = C.c_void_p, [C.c_void_p, C.c_char_p]
    address = lambda name: dlsym(cuda._handle, name.encode())
    path = mapped("libcuda.so")
    names = sorted(name for name in exports(path) if name.startswith("cu"))
    known = {address(name): name for name in names if address(name)}
    version = C.c_int()
    cuda.cuDriverGetVersion(C.byref(version))
    print(f"driver {version.value}, {path}, {len(names)} functions", "under gputrace" if mapped("libgputrace.so") else "")
    bases = sorted({SUFFIX.sub("", name) for name in names})
    answers, strange = 0, []
    for ask in ("cuGetProcAddress_v2", "cuGetProcAddress"):
        get = getattr(cuda, ask)
        for base in bases:
            for flags in (0, 1, 2):
                for asked in (*(v for v in VERSIONS if v <= version.value), version.value):
                    pointer, status = C.c_void_p(), C.c_int(-1)
                    more = (C.byref(status),) if ask.endswith("_v2") else ()
                    if get(base.encode(), C.byref(pointer), asked, C.c_uint64(flags), *more) == 0 and pointer.value:
                        answers += 1
                        if pointer.value not in known: strange.append((base, asked, flags, ask))
    shown = sorted({base for base, *_ in strange})
    print("FAIL" if strange else "PASS", f"{answers} answers for {len(bases)} names, {len(strange)} of them no export {shown[:20]}")
    runtimes = sys.argv[1:] or [path for folder in sys.path for path in glob.glob(folder + "/nvidia/**/libcudart.so.1[123]*", recursive=True)]
    for runtime in runtimes:
        library = C.CDLL(runtime)
        for name, more in (("cudaGetDriverEntryPointByVersion", (C.c_uint(12000),)), ("cudaGetDriverEntryPoint", ())):
            if not hasattr(library, name): continue
            pointer, status = C.c_void_p(), C.c_int(-1)
            result = getattr(library, name)(b"cuMemCreate", C.byref(pointer), *more, C.c_uint64(0), C.byref(status))
            good = result == 0 and pointer.value == address("cuMemCreate")
            print("PASS" if good else "FAIL", f"{os.path.basename(runtime)} {name} gives out what dlsym does ({result})")


main()

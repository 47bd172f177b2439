/* Modules, libraries, kernels: they load, their functions are found, launches succeed, and nothing runs. Enough for programs
 * whose memory is of interest and whose results are not. */
#include "fake.h"

#include <stdlib.h>

/* What every handle points to: something of its own, so that handles differ. */
struct code {
    struct code *next, *function; /* of a kernel, once asked for */
    unsigned char padding[64];
};
typedef struct code *handle;

static struct code *all;

static CUresult make(handle *out)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    struct code *code = calloc(1, sizeof *code);
    if (!code) return CUDA_ERROR_OUT_OF_MEMORY;
    code->next = all;
    *out = all = code;
    return CUDA_SUCCESS;
}

static CUresult put_int(int *out, int value)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = value;
    return CUDA_SUCCESS;
}

static CUresult put_size(size_t *out, size_t value)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = value;
    return CUDA_SUCCESS;
}

/* CUfunction_attribute, cuda.h 13.5: what occupancy calculations look at. */
static int function_attribute(int which)
{
    switch (which) {
    case 0: return 1024;  /* MAX_THREADS_PER_BLOCK */
    case 4: return 32;    /* NUM_REGS */
    case 5: case 6: return 90; /* PTX_VERSION, BINARY_VERSION */
    case 8: return 48 * 1024; /* MAX_DYNAMIC_SHARED_SIZE_BYTES */
    default: return 0;
    }
}

/* A `__device__` variable of any module: an address of its own, and more room than anybody asks for. */
static CUresult global(CUdeviceptr *out, size_t *bytes, size_t size)
{
    struct context *context = context_current();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    CUdeviceptr base = space_reserve(size, 64 * KIB, 0);
    if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
    book_add((struct allocation){.base = base, .bytes = size, .extent = size, .kind = MODULE_DATA,
                                 .device = context->device, .context = context});
    if (out) *out = base;
    if (bytes) *bytes = size;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *out, size_t *bytes, handle module, const char *name)
{
    (void)module, (void)name;
    CALL(NEEDS_CONTEXT, global(out, bytes, 64 * KIB), "ptr=0x%llx", OUT(out));
}
EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *out, size_t *bytes, handle library, const char *name)
{
    (void)library, (void)name;
    CALL(NEEDS_CONTEXT, global(out, bytes, 64 * KIB), "ptr=0x%llx", OUT(out));
}

EXPORT CUresult cuModuleLoad(handle *out, const char *path)
{
    (void)path;
    CALL(NEEDS_CONTEXT, make(out), "module=0x%llx", OUT(out));
}
EXPORT CUresult cuModuleLoadData(handle *out, const void *image)
{
    (void)image;
    CALL(NEEDS_CONTEXT, make(out), "module=0x%llx", OUT(out));
}
EXPORT CUresult cuModuleLoadDataEx(handle *out, const void *image, unsigned count, int *options, void **values)
{
    (void)image, (void)count, (void)options, (void)values;
    CALL(NEEDS_CONTEXT, make(out), "module=0x%llx", OUT(out));
}
EXPORT CUresult cuModuleLoadFatBinary(handle *out, const void *image)
{
    (void)image;
    CALL(NEEDS_CONTEXT, make(out), "module=0x%llx", OUT(out));
}
EXPORT CUresult cuModuleUnload(handle module) { CALL(NEEDS_CONTEXT, CUDA_SUCCESS, "module=%p", (void *)module); }
EXPORT CUresult cuModuleGetFunction(handle *out, handle module, const char *name)
{
    (void)module, (void)name;
    QUERY(NEEDS_CONTEXT, make(out));
}
EXPORT CUresult cuLibraryLoadData(handle *out, const void *image, int *options, void **values, unsigned count,
                                  int *library_options, void **library_values, unsigned library_count)
{
    (void)image, (void)options, (void)values, (void)count, (void)library_options, (void)library_values;
    (void)library_count;
    CALL(NEEDS_INIT, make(out), "library=0x%llx", OUT(out));
}
EXPORT CUresult cuLibraryUnload(handle library) { CALL(NEEDS_INIT, CUDA_SUCCESS, "library=%p", (void *)library); }
EXPORT CUresult cuLibraryGetKernel(handle *out, handle library, const char *name)
{
    (void)library, (void)name;
    QUERY(NEEDS_INIT, make(out));
}
EXPORT CUresult cuLibraryGetModule(handle *out, handle library)
{
    (void)library;
    QUERY(NEEDS_CONTEXT, make(out));
}
/* The same one every time it is asked for, as with the real driver. */
static CUresult function_of(handle *out, handle kernel)
{
    struct code *code = kernel;
    if (!out || !code) return CUDA_ERROR_INVALID_VALUE;
    *out = code->function;
    if (!*out && make(out) == CUDA_SUCCESS) code->function = *out;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuKernelGetFunction(handle *out, handle kernel)
{
    QUERY(NEEDS_CONTEXT, function_of(out, kernel));
}
EXPORT CUresult cuKernelGetAttribute(int *out, int which, handle kernel, CUdevice device)
{
    (void)kernel, (void)device;
    QUERY(NEEDS_INIT, put_int(out, function_attribute(which)));
}
EXPORT CUresult cuKernelSetAttribute(int which, int value, handle kernel, CUdevice device)
{
    (void)which, (void)value, (void)kernel, (void)device;
    QUERY(NEEDS_INIT, CUDA_SUCCESS);
}
EXPORT CUresult cuFuncGetAttribute(int *out, int which, handle function)
{
    (void)function;
    QUERY(NEEDS_CONTEXT, put_int(out, function_attribute(which)));
}
EXPORT CUresult cuFuncLoad(handle function)
{
    (void)function;
    QUERY(NEEDS_CONTEXT, CUDA_SUCCESS);
}
EXPORT CUresult cuFuncIsLoaded(int *out, handle function)
{
    (void)function;
    QUERY(NEEDS_CONTEXT, put_int(out, 1));
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, handle function, int block, size_t shared)
{
    (void)function, (void)block, (void)shared;
    QUERY(NEEDS_CONTEXT, put_int(out, 2));
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, handle function, int block, size_t shared,
                                                                     unsigned flags)
{
    (void)function, (void)block, (void)shared, (void)flags;
    QUERY(NEEDS_CONTEXT, put_int(out, 2));
}
EXPORT CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *out, handle function, int blocks, int block)
{
    (void)function, (void)blocks, (void)block;
    QUERY(NEEDS_CONTEXT, put_size(out, 48 * KIB));
}

EXPORT CUresult cuOccupancyMaxActiveClusters(int *out, handle function, const void *config)
{
    (void)function, (void)config;
    QUERY(NEEDS_CONTEXT, put_int(out, 1));
}
EXPORT CUresult cuOccupancyMaxPotentialClusterSize(int *out, handle function, const void *config)
{
    (void)function, (void)config;
    QUERY(NEEDS_CONTEXT, put_int(out, 8));
}

/* The same for the runtime, which hands over fat binaries through a table of cuGetExportTable. */
CUresult module_from_fatbin(handle *out) { QUERY(NEEDS_INIT, make(out)); }

/* A CUDA driver without a GPU: counts pages, hands out addresses, never uses one twice.
 *
 * STUB_TOTAL is the memory of the device in bytes; with STUB_DESCENDING set, addresses go down instead of up.
 * Everything that the allocator does not need fails with CUDA_ERROR_NOT_SUPPORTED. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

enum { OK = 0, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };
enum { PAGE = 2 << 20 };

static uint64_t total, used, next_address = 0x7f0000000000ull;
static int descending, events_are_done = 1, ready;
static struct { uint64_t address, bytes; } *live;
static size_t n_live, capacity;
/* cudaMalloc, cudaFree, cuMemCreate, cuMemRelease */
static uint64_t calls[4];

static void prepare(void) {
    if (ready) return;
    ready = 1;
    const char *text = getenv("STUB_TOTAL");
    total = text ? strtoull(text, NULL, 0) : 40ull << 30;
    descending = getenv("STUB_DESCENDING") != NULL;
}

static uint64_t pages(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static uint64_t place(uint64_t bytes) {
    bytes = pages(bytes);
    if (descending) return next_address -= bytes;
    next_address += bytes;
    return next_address - bytes;
}

uint64_t stub_total(void) { prepare(); return total; }
uint64_t stub_used(void) { return used; }
uint64_t stub_calls(int which) { return calls[which]; }
void stub_set_done(int done) { events_are_done = done; }
int stub_is_done(void) { return events_are_done; }

int stub_malloc(void **out, size_t bytes) {
    prepare();
    *out = NULL;
    if (used + pages(bytes) > total) return OUT_OF_MEMORY;
    used += pages(bytes);
    calls[0]++;
    if (n_live == capacity) live = realloc(live, (capacity = capacity ? 2 * capacity : 1024) * sizeof *live);
    live[n_live].address = place(bytes);
    live[n_live].bytes = pages(bytes);
    *out = (void *)live[n_live++].address;
    return OK;
}

int stub_free(void *pointer) {
    for (size_t i = n_live; i-- > 0;) {
        if (live[i].address != (uint64_t)pointer) continue;
        used -= live[i].bytes;
        live[i] = live[--n_live];
        calls[1]++;
        return OK;
    }
    return 1;
}

int cuMemAddressReserve(uint64_t *out, size_t bytes, size_t align, uint64_t hint, uint64_t flags) { *out = place(bytes); return OK; }
int cuMemAddressFree(uint64_t address, size_t bytes) { return OK; }
int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, uint64_t flags) {
    prepare();
    if (used + bytes > total) return OUT_OF_MEMORY;
    used += bytes;
    calls[2]++;
    *handle = bytes;
    return OK;
}
int cuMemRelease(uint64_t handle) { used -= handle; calls[3]++; return OK; }
int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) { return OK; }
int cuMemUnmap(uint64_t address, size_t bytes) { return OK; }
int cuMemSetAccess(uint64_t address, size_t bytes, const void *access, size_t n) { return OK; }
int cuMemGetAllocationGranularity(size_t *out, const void *properties, int kind) { *out = PAGE; return OK; }
int cuGetErrorString(int error, const char **out) { *out = "stub error"; return OK; }
int cuDeviceGet(int *out, int ordinal) { *out = ordinal; return OK; }
int cuDeviceGetAttribute(int *out, int attribute, int device) { *out = 0; return OK; }

#define ABSENT(name) int name(void) { return NOT_SUPPORTED; }
ABSENT(cuCtxFromGreenCtx) ABSENT(cuCtxGetCurrent) ABSENT(cuCtxPopCurrent) ABSENT(cuCtxPushCurrent) ABSENT(cuCtxSetCurrent)
ABSENT(cuDevResourceGenerateDesc) ABSENT(cuDevSmResourceSplitByCount) ABSENT(cuDeviceGetDevResource) ABSENT(cuDeviceGetUuid)
ABSENT(cuGetProcAddress) ABSENT(cuGreenCtxCreate) ABSENT(cuGreenCtxDestroy) ABSENT(cuGreenCtxStreamCreate)
ABSENT(cuMemExportToShareableHandle) ABSENT(cuMemFreeHost) ABSENT(cuMemGetAddressRange) ABSENT(cuMemGetAddressRange_v2)
ABSENT(cuMemGetAllocationPropertiesFromHandle) ABSENT(cuMemHostAlloc) ABSENT(cuMemHostRegister) ABSENT(cuMemHostUnregister)
ABSENT(cuMemImportFromShareableHandle) ABSENT(cuMemRetainAllocationHandle) ABSENT(cuMemcpyBatchAsync) ABSENT(cuMemsetD32Async)
ABSENT(cuMulticastAddDevice) ABSENT(cuMulticastBindMem) ABSENT(cuMulticastCreate) ABSENT(cuMulticastUnbind)
ABSENT(cuPointerGetAttribute) ABSENT(cuStreamWriteValue32) ABSENT(cuStreamWriteValue32_v2)

/* A CUDA driver without a GPU: counts pages, hands out addresses, never uses one twice.
 *
 * The harness says how much memory the device has, in which direction addresses go and which events are done.
 * Everything that the allocator does not need fails with CUDA_ERROR_NOT_SUPPORTED. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

enum { OK = 0, OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };
enum { PAGE = 2 << 20 };

static uint64_t total = 40ull << 30, used, next_address = 0x7f0000000000ull;
static int descending;
static struct { uint64_t address, bytes; } *live;
static size_t n_live, capacity;

static uint64_t pages(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static uint64_t place(uint64_t bytes) {
    bytes = pages(bytes);
    if (descending) return next_address -= bytes;
    next_address += bytes;
    return next_address - bytes;
}

void stub_set_device(uint64_t bytes, int ascending) {
    total = bytes;
    descending = !ascending;
}
uint64_t stub_total(void) { return total; }
uint64_t stub_used(void) { return used; }

/* Events: where in the sequence of all recorded ones, and on which of a few streams; up to where each stream has come. */
enum { EVENTS = 1 << 16, STREAMS = 64 };
static int all_done = 1, n_streams;
static uint64_t n_recorded, finished[STREAMS];
static void *streams[STREAMS];
static struct { uint64_t number; int stream; } events[EVENTS];

static int stream_index(void *stream) {
    for (int i = 0; i < n_streams; i++)
        if (streams[i] == stream) return i;
    if (n_streams == STREAMS) abort();
    streams[n_streams] = stream;
    return n_streams++;
}
void stub_record(void *event, void *stream) {
    const uintptr_t index = (uintptr_t)event;
    if (index >= EVENTS) abort();
    events[index].number = ++n_recorded;
    events[index].stream = stream_index(stream);
}
/* From now on every event is done at once, or only `stub_finish` makes it so. What was done stays done. */
void stub_set_done(int done) {
    for (int i = 0; all_done && i < n_streams; i++) finished[i] = n_recorded;
    all_done = done;
}
void stub_finish(void *stream) { finished[stream_index(stream)] = n_recorded; }
int stub_is_done(void *event) {
    const uintptr_t index = (uintptr_t)event;
    return all_done || events[index].number <= finished[events[index].stream];
}

int stub_malloc(void **out, size_t bytes) {
    *out = NULL;
    if (used + pages(bytes) > total) return OUT_OF_MEMORY;
    used += pages(bytes);
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
        return OK;
    }
    return 1;
}

int cuMemAddressReserve(uint64_t *out, size_t bytes, size_t align, uint64_t hint, uint64_t flags) { *out = place(bytes); return OK; }
int cuMemAddressFree(uint64_t address, size_t bytes) { return OK; }
int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, uint64_t flags) {
    if (used + bytes > total) return OUT_OF_MEMORY;
    used += bytes;
    *handle = bytes;
    return OK;
}
int cuMemRelease(uint64_t handle) { used -= handle; return OK; }
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

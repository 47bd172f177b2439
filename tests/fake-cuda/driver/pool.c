/* Stream-ordered allocation and its pools.
 *
 * A pool reserves chunks of 32 MiB (more for larger requests) and hands out multiples of 512 bytes of them. As every stream of
 * the fake is always idle, a freed block is free at once; what is above the release threshold goes back at the next
 * synchronisation. */
#define _GNU_SOURCE
#include "fake.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/mman.h>

#define CHUNK (32 * MIB)

enum {
    REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
    REUSE_ALLOW_OPPORTUNISTIC,
    REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    RELEASE_THRESHOLD,
    RESERVED_MEM_CURRENT,
    RESERVED_MEM_HIGH,
    USED_MEM_CURRENT,
    USED_MEM_HIGH,
};

struct pool {
    struct pool *next;
    int device;
    bool is_default, doomed, imported;
    struct span *chunks;
    cuuint64_t threshold, reserved, reserved_high, used, used_high;
    size_t max_size;
    int reuse[4];
};

static struct pool *pools;
static struct pool *current[MAX_DEVICES], *defaults[MAX_DEVICES];

static struct pool *pool_new(int device)
{
    struct pool *pool = calloc(1, sizeof *pool);
    if (!pool) abort();
    *pool = (struct pool){.next = pools, .device = device, .reuse = {0, 1, 1, 1}};
    return pools = pool;
}

static struct pool *pool_default(int device)
{
    if (!defaults[device]) {
        defaults[device] = pool_new(device);
        defaults[device]->is_default = true;
    }
    return defaults[device];
}

static struct pool *pool_current(int device) { return current[device] ? current[device] : pool_default(device); }

static bool pool_valid(struct pool *pool)
{
    for (struct pool *p = pools; p; p = p->next)
        if (p == pool) return !p->doomed;
    return false;
}

static struct span *grow(struct pool *pool, size_t bytes)
{
    size_t size = bytes > CHUNK ? round_up(bytes, CHUNK) : CHUNK;
    size_t unit = bytes > CHUNK ? 2 * MIB : 512;
    if (pool->max_size && pool->reserved + size > pool->max_size) return NULL;
    if (!device_charge(pool->device, size)) return NULL;
    CUdeviceptr base = space_reserve(size, CHUNK, 0);
    struct span *chunk = base ? span_new(base, size, unit) : NULL;
    if (!chunk) {
        if (base) space_unreserve(base, size);
        device_refund(pool->device, size);
        return NULL;
    }
    chunk->next = pool->chunks;
    pool->chunks = chunk;
    pool->reserved += size;
    if (pool->reserved > pool->reserved_high) pool->reserved_high = pool->reserved;
    return chunk;
}

static void trim(struct pool *pool, cuuint64_t keep)
{
    for (struct span **at = &pool->chunks; *at;) {
        struct span *chunk = *at;
        size_t size = chunk->units * chunk->unit;
        if (chunk->free_units < chunk->units || pool->reserved <= keep) {
            at = &chunk->next;
            continue;
        }
        *at = chunk->next;
        space_unreserve(chunk->base, size);
        device_refund(pool->device, size);
        pool->reserved -= size;
        span_delete(chunk);
    }
}

static struct span *best_chunk(struct pool *pool, size_t bytes, size_t *start)
{
    struct span *best = NULL;
    size_t smallest = SIZE_MAX;
    for (struct span *chunk = pool->chunks; chunk; chunk = chunk->next) {
        size_t at, hole;
        if (!span_find(chunk, round_up(bytes, chunk->unit) / chunk->unit, &at, &hole)) continue;
        if (hole * chunk->unit >= smallest) continue;
        smallest = hole * chunk->unit;
        *start = at;
        best = chunk;
    }
    return best;
}

CUresult pool_alloc(struct pool *pool, size_t bytes, CUdeviceptr *address)
{
    if (!address || !bytes) return CUDA_ERROR_INVALID_VALUE;
    if (!pool_valid(pool)) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > device_total(pool->device)) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t start = 0;
    struct span *chunk = best_chunk(pool, bytes, &start);
    if (!chunk) chunk = grow(pool, bytes);
    if (!chunk) { /* out of memory: what other pools hold unused is given up first */
        for (struct pool *p = pools; p; p = p->next)
            if (p->device == pool->device) trim(p, 0);
        chunk = grow(pool, bytes);
    }
    if (!chunk) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t units = round_up(bytes, chunk->unit) / chunk->unit;
    span_take(chunk, start, units);
    struct allocation entry = {.base = chunk->base + start * chunk->unit, .bytes = bytes,
                               .extent = units * chunk->unit, .kind = STREAM_ORDERED, .device = pool->device,
                               .context = context_current(), .pool = pool, .chunk = chunk};
    pool->used += entry.extent;
    if (pool->used > pool->used_high) pool->used_high = pool->used;
    book_add(entry);
    *address = entry.base;
    return CUDA_SUCCESS;
}

CUresult pool_alloc_default(size_t bytes, CUdeviceptr *address)
{
    return pool_alloc(pool_current(context_current()->device), bytes, address);
}

static void pool_bury(struct pool *pool)
{
    trim(pool, 0);
    for (struct pool **at = &pools; *at; at = &(*at)->next) {
        if (*at != pool) continue;
        *at = pool->next;
        free(pool);
        return;
    }
}

CUresult pool_free(struct allocation *entry)
{
    struct pool *pool = entry->pool;
    struct span *chunk = entry->chunk;
    span_give(chunk, (entry->base - chunk->base) / chunk->unit, entry->extent / chunk->unit);
    pool->used -= entry->extent;
    book_remove(entry);
    if (pool->doomed && !pool->used) pool_bury(pool);
    return CUDA_SUCCESS;
}

void pools_synchronize(void)
{
    for (struct pool *pool = pools; pool; pool = pool->next) trim(pool, pool->threshold);
}

static CUresult alloc_async(CUdeviceptr *out, size_t bytes, struct pool *pool, CUstream stream)
{
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream_capturing(stream)) return graph_add_alloc(stream_graph(stream), context_current()->device, bytes, out, NULL);
    return pool_alloc(pool ? pool : pool_current(context_current()->device), bytes, out);
}

static CUresult free_async(CUdeviceptr address, CUstream stream)
{
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream_capturing(stream)) return graph_add_free(stream_graph(stream), address, NULL);
    struct allocation *entry = book_starting_at(address);
    if (!entry || entry->kind == HOST || entry->kind == REGISTERED) return CUDA_ERROR_INVALID_VALUE;
    if (entry->kind == STREAM_ORDERED) return pool_free(entry);
    return memory_free(address);
}

static CUresult create(struct pool **out, const CUmemPoolProps *props)
{
    if (!out || !props || props->type != 1) return CUDA_ERROR_INVALID_VALUE; /* CU_MEM_ALLOCATION_TYPE_PINNED */
    if (props->location.type != LOCATION_DEVICE || !device_valid(props->location.id)) return CUDA_ERROR_INVALID_VALUE;
    *out = pool_new(props->location.id);
    (*out)->max_size = props->max_size;
    return CUDA_SUCCESS;
}

static CUresult destroy(struct pool *pool)
{
    if (!pool_valid(pool) || pool->is_default) return CUDA_ERROR_INVALID_VALUE;
    if (current[pool->device] == pool) current[pool->device] = NULL;
    pool->doomed = true; /* its blocks stay valid until they are freed */
    if (!pool->used) pool_bury(pool);
    return CUDA_SUCCESS;
}

static CUresult get_attribute(struct pool *pool, int which, void *out)
{
    if (!pool_valid(pool) || !out) return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
    case REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case REUSE_ALLOW_OPPORTUNISTIC:
    case REUSE_ALLOW_INTERNAL_DEPENDENCIES: *(int *)out = pool->reuse[which]; break;
    case RELEASE_THRESHOLD: *(cuuint64_t *)out = pool->threshold; break;
    case RESERVED_MEM_CURRENT: *(cuuint64_t *)out = pool->reserved; break;
    case RESERVED_MEM_HIGH: *(cuuint64_t *)out = pool->reserved_high; break;
    case USED_MEM_CURRENT: *(cuuint64_t *)out = pool->used; break;
    case USED_MEM_HIGH: *(cuuint64_t *)out = pool->used_high; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

static CUresult set_attribute(struct pool *pool, int which, const void *value)
{
    if (!pool_valid(pool) || !value) return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
    case REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case REUSE_ALLOW_OPPORTUNISTIC:
    case REUSE_ALLOW_INTERNAL_DEPENDENCIES: pool->reuse[which] = *(const int *)value; break;
    case RELEASE_THRESHOLD: pool->threshold = *(const cuuint64_t *)value; break;
    case RESERVED_MEM_HIGH: /* a high-water mark can only be reset */
        if (*(const cuuint64_t *)value) return CUDA_ERROR_INVALID_VALUE;
        pool->reserved_high = pool->reserved;
        break;
    case USED_MEM_HIGH:
        if (*(const cuuint64_t *)value) return CUDA_ERROR_INVALID_VALUE;
        pool->used_high = pool->used;
        break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

static CUresult trim_to(struct pool *pool, size_t keep)
{
    if (!pool_valid(pool)) return CUDA_ERROR_INVALID_VALUE;
    trim(pool, keep);
    return CUDA_SUCCESS;
}

static CUresult check(struct pool *pool) { return pool_valid(pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

static CUresult put_pool(struct pool **out, struct pool *(*which)(int), CUdevice device)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    *out = which(device);
    return CUDA_SUCCESS;
}

static CUresult set_current(CUdevice device, struct pool *pool)
{
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!pool_valid(pool)) return CUDA_ERROR_INVALID_VALUE;
    current[device] = pool;
    return CUDA_SUCCESS;
}

/* A shareable handle is a memfd; its content names the exporter, so that both ends of a test can be compared. */
static CUresult export_pool(int *out, struct pool *pool, int type)
{
    if (!out || !pool_valid(pool) || type != 1) return CUDA_ERROR_INVALID_VALUE; /* POSIX_FILE_DESCRIPTOR */
    int fd = memfd_create("fake-cuda-pool", MFD_CLOEXEC);
    int device = pool->device;
    if (fd < 0 || write(fd, &device, sizeof device) != sizeof device) return CUDA_ERROR_UNKNOWN;
    *out = fd;
    return CUDA_SUCCESS;
}

static CUresult import_pool(struct pool **out, void *handle, int type)
{
    int device;
    if (!out || type != 1) return CUDA_ERROR_INVALID_VALUE;
    if (pread((int)(intptr_t)handle, &device, sizeof device, 0) != sizeof device || !device_valid(device))
        return CUDA_ERROR_INVALID_HANDLE;
    *out = pool_new(device);
    (*out)->imported = true;
    return CUDA_SUCCESS;
}

struct exported_pointer {
    CUdeviceptr address;
    size_t bytes;
};

static CUresult export_pointer(unsigned char out[64], CUdeviceptr address)
{
    struct allocation *entry = book_starting_at(address);
    if (!out || !entry || entry->kind != STREAM_ORDERED) return CUDA_ERROR_INVALID_VALUE;
    struct exported_pointer exported = {address, entry->bytes};
    memset(out, 0, 64);
    memcpy(out, &exported, sizeof exported);
    return CUDA_SUCCESS;
}

static CUresult import_pointer(CUdeviceptr *out, struct pool *pool, const unsigned char data[64])
{
    struct exported_pointer exported;
    if (!out || !data || !pool_valid(pool)) return CUDA_ERROR_INVALID_VALUE;
    memcpy(&exported, data, sizeof exported);
    size_t extent = round_up(exported.bytes, 2 * MIB);
    CUdeviceptr base = extent ? space_reserve(extent, 2 * MIB, 0) : 0;
    if (!base) return CUDA_ERROR_INVALID_VALUE;
    book_add((struct allocation){.base = base, .bytes = exported.bytes, .extent = extent, .kind = IMPORTED,
                                 .device = pool->device, .context = context_current(), .pool = pool});
    *out = base;
    return CUDA_SUCCESS;
}

#define ALLOC_LOG "bytes=%zu stream=%p ptr=0x%llx"
EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    CALL(NEEDS_CONTEXT, alloc_async(out, bytes, NULL, stream), ALLOC_LOG, bytes, (void *)stream, OUT(out));
}
EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream stream)
{
    CALL(NEEDS_CONTEXT, alloc_async(out, bytes, NULL, stream), ALLOC_LOG, bytes, (void *)stream, OUT(out));
}
EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    CALL(NEEDS_CONTEXT, pool ? alloc_async(out, bytes, pool, stream) : CUDA_ERROR_INVALID_VALUE, ALLOC_LOG " pool=%p", bytes,
         (void *)stream, OUT(out), (void *)pool);
}
EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    CALL(NEEDS_CONTEXT, pool ? alloc_async(out, bytes, pool, stream) : CUDA_ERROR_INVALID_VALUE, ALLOC_LOG " pool=%p", bytes,
         (void *)stream, OUT(out), (void *)pool);
}
EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream)
{
    CALL(NEEDS_CONTEXT, free_async(address, stream), "ptr=0x%llx stream=%p", address, (void *)stream);
}
EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr address, CUstream stream)
{
    CALL(NEEDS_CONTEXT, free_async(address, stream), "ptr=0x%llx stream=%p", address, (void *)stream);
}
EXPORT CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props)
{
    CALL(NEEDS_INIT, create(out, props), "pool=0x%llx", OUT(out));
}
EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool) { CALL(NEEDS_INIT, destroy(pool), "pool=%p", (void *)pool); }
EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    CALL(NEEDS_INIT, trim_to(pool, keep), "pool=%p keep=%zu", (void *)pool, keep);
}
EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int which, void *out)
{
    QUERY(NEEDS_INIT, get_attribute(pool, which, out));
}
EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int which, void *value)
{
    CALL(NEEDS_INIT, set_attribute(pool, which, value), "pool=%p attribute=%d", (void *)pool, which);
}
EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *access, size_t count)
{
    (void)access, (void)count;
    CALL(NEEDS_INIT, check(pool), "pool=%p", (void *)pool);
}
EXPORT CUresult cuMemPoolGetAccess(int *flags, CUmemoryPool pool, CUmemLocation *location)
{
    (void)location;
    QUERY(NEEDS_INIT, flags && pool_valid(pool) ? (*flags = 3, CUDA_SUCCESS) : CUDA_ERROR_INVALID_VALUE);
}
EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device)
{
    QUERY(NEEDS_INIT, put_pool(out, pool_default, device));
}
EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device)
{
    QUERY(NEEDS_INIT, put_pool(out, pool_current, device));
}
EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    CALL(NEEDS_INIT, set_current(device, pool), "device=%d pool=%p", device, (void *)pool);
}
EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, int type)
{
    QUERY(NEEDS_INIT, location && location->type == LOCATION_DEVICE && type == 1
                          ? put_pool(out, pool_default, location->id) : CUDA_ERROR_INVALID_VALUE);
}
EXPORT CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, int type)
{
    QUERY(NEEDS_INIT, location && location->type == LOCATION_DEVICE && type == 1
                          ? put_pool(out, pool_current, location->id) : CUDA_ERROR_INVALID_VALUE);
}
EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, int type, CUmemoryPool pool)
{
    CALL(NEEDS_INIT, location && location->type == LOCATION_DEVICE && type == 1 ? set_current(location->id, pool)
                                                                               : CUDA_ERROR_INVALID_VALUE,
         "pool=%p", (void *)pool);
}
EXPORT CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, int type, cuuint64_t flags)
{
    (void)flags;
    CALL(NEEDS_INIT, export_pool(out, pool, type), "pool=%p", (void *)pool);
}
EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *handle, int type, cuuint64_t flags)
{
    (void)flags;
    CALL(NEEDS_INIT, import_pool(out, handle, type), "pool=0x%llx", OUT(out));
}
EXPORT CUresult cuMemPoolExportPointer(void *out, CUdeviceptr address)
{
    CALL(NEEDS_CONTEXT, export_pointer(out, address), "ptr=0x%llx", address);
}
EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool pool, void *data)
{
    CALL(NEEDS_CONTEXT, import_pointer(out, pool, data), "pool=%p ptr=0x%llx", (void *)pool, OUT(out));
}

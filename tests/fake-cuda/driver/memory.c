/* Linear, pitched, managed and pinned-host memory, registration, address queries, and the 32-bit v1 leftovers. */
#define _GNU_SOURCE
#include "fake.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PITCH ((size_t)512)

static CUresult alloc_linear(CUdeviceptr *out, size_t bytes, enum kind kind)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    struct context *context = context_current();
    struct allocation entry = {.bytes = bytes, .kind = kind, .device = context->device, .context = context};
    CUresult result = space_alloc(context->device, bytes, &entry.base, &entry.extent);
    if (result != CUDA_SUCCESS) return result;
    book_add(entry);
    *out = entry.base;
    return CUDA_SUCCESS;
}

static CUresult alloc_pitched(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    if (!out || !pitch || !width || !height) return CUDA_ERROR_INVALID_VALUE;
    if (element != 4 && element != 8 && element != 16) return CUDA_ERROR_INVALID_VALUE;
    size_t row, bytes;
    if (__builtin_add_overflow(width, PITCH - 1, &row)) return CUDA_ERROR_OUT_OF_MEMORY;
    row = row / PITCH * PITCH;
    if (__builtin_mul_overflow(row, height, &bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = alloc_linear(out, bytes, PITCHED);
    if (result == CUDA_SUCCESS) *pitch = row;
    return result;
}

/* Memory that the host can touch; it costs the device nothing until it is used there, which the fake never does. */
static CUresult alloc_mapped(CUdeviceptr *out, size_t bytes, enum kind kind)
{
    if (!out || !bytes) return CUDA_ERROR_INVALID_VALUE;
    size_t page = (size_t)sysconf(_SC_PAGESIZE), extent;
    if (__builtin_add_overflow(bytes, page - 1, &extent)) return CUDA_ERROR_OUT_OF_MEMORY;
    extent = extent / page * page;
    void *map = mmap(NULL, extent, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    struct context *context = context_current();
    book_add((struct allocation){.base = (CUdeviceptr)(uintptr_t)map, .bytes = bytes, .extent = extent, .kind = kind,
                                 .device = context->device, .context = context});
    *out = (CUdeviceptr)(uintptr_t)map;
    return CUDA_SUCCESS;
}

static CUresult alloc_host(void **out, size_t bytes)
{
    CUdeviceptr address = 0;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = alloc_mapped(&address, bytes, HOST);
    if (result == CUDA_SUCCESS) *out = (void *)(uintptr_t)address;
    return result;
}

static CUresult alloc_managed(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    if (flags != 1 && flags != 2) return CUDA_ERROR_INVALID_VALUE; /* CU_MEM_ATTACH_GLOBAL, _HOST */
    return alloc_mapped(out, bytes, MANAGED);
}

/* Gives back whatever the entry holds, however it was made. */
void memory_release(struct allocation *entry)
{
    switch (entry->kind) {
    case LINEAR:
    case PITCHED: space_free(entry->device, entry->base, entry->extent); break;
    case MANAGED:
    case HOST: munmap((void *)(uintptr_t)entry->base, entry->extent); break;
    case REGISTERED: break;
    case STREAM_ORDERED: pool_free(entry); return;
    case MODULE_DATA:
    case IMPORTED: space_unreserve(entry->base, entry->extent); break;
    case GRAPH_MEMORY: entry->context = NULL; return; /* goes with its graph */
    }
    book_remove(entry);
}

CUresult memory_free(CUdeviceptr address)
{
    if (!address) return CUDA_SUCCESS;
    struct allocation *entry = book_starting_at(address);
    if (!entry || entry->kind == HOST || entry->kind == REGISTERED || entry->kind == IMPORTED ||
        entry->kind == GRAPH_MEMORY || entry->kind == MODULE_DATA)
        return CUDA_ERROR_INVALID_VALUE;
    memory_release(entry);
    pools_synchronize(); /* cuMemFree waits for the device */
    return CUDA_SUCCESS;
}

static CUresult free_host(void *pointer)
{
    struct allocation *entry = book_starting_at((CUdeviceptr)(uintptr_t)pointer);
    if (!entry || entry->kind != HOST) return CUDA_ERROR_INVALID_VALUE;
    memory_release(entry);
    return CUDA_SUCCESS;
}

static CUresult host_register(void *pointer, size_t bytes)
{
    if (!pointer || !bytes || (uintptr_t)pointer + bytes < bytes) return CUDA_ERROR_INVALID_VALUE;
    struct context *context = context_current();
    struct allocation entry = {.base = (CUdeviceptr)(uintptr_t)pointer, .bytes = bytes, .extent = bytes,
                               .kind = REGISTERED, .device = context->device, .context = context};
    return book_add(entry) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

static CUresult host_unregister(void *pointer)
{
    struct allocation *entry = book_starting_at((CUdeviceptr)(uintptr_t)pointer);
    if (!entry || entry->kind != REGISTERED) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    memory_release(entry);
    return CUDA_SUCCESS;
}

static CUresult get_info(size_t *free_bytes, size_t *total)
{
    int device = context_current()->device;
    if (free_bytes) *free_bytes = device_free(device);
    if (total) *total = device_total(device);
    return CUDA_SUCCESS;
}

/* What the driver knows about an address: an allocation, or mapped physical memory as if it were one. */
static bool look_up(CUdeviceptr address, struct allocation *out)
{
    struct allocation *entry = book_at(address);
    if (entry) {
        *out = *entry;
        return true;
    }
    *out = (struct allocation){.kind = LINEAR};
    if (!vmm_range(address, &out->base, &out->bytes, &out->device)) return false;
    if (out->device < 0) out->kind = HOST;
    return true;
}

static CUresult address_range(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    struct allocation found;
    if (!look_up(address, &found)) return CUDA_ERROR_NOT_FOUND;
    if (base) *base = found.base;
    if (bytes) *bytes = found.bytes;
    return CUDA_SUCCESS;
}

static CUresult host_device_pointer(CUdeviceptr *out, void *pointer)
{
    struct allocation *entry = book_at((CUdeviceptr)(uintptr_t)pointer);
    if (!out || !entry) return CUDA_ERROR_INVALID_VALUE;
    *out = (CUdeviceptr)(uintptr_t)pointer;
    return CUDA_SUCCESS;
}

static int memory_type(const struct allocation *entry)
{
    return entry->kind == HOST || entry->kind == REGISTERED ? 1 : 2; /* CU_MEMORYTYPE_HOST, _DEVICE */
}

/* CUpointer_attribute, cuda.h 13.5. */
static CUresult pointer_attribute(void *out, int which, CUdeviceptr address)
{
    struct allocation found, *entry = &found;
    if (!out || !look_up(address, &found)) return CUDA_ERROR_INVALID_VALUE;
    switch (which) {
    case 1: *(struct context **)out = entry->context; break;
    case 2: *(unsigned *)out = (unsigned)memory_type(entry); break;
    case 3: *(CUdeviceptr *)out = address; break;                              /* DEVICE_POINTER */
    case 4: *(void **)out = memory_type(entry) == 1 || entry->kind == MANAGED ? (void *)(uintptr_t)address : NULL; break;
    case 7: *(unsigned long long *)out = entry->id; break;                     /* BUFFER_ID */
    case 8: *(int *)out = entry->kind == MANAGED; break;                       /* IS_MANAGED */
    case 9: *(int *)out = entry->device; break;                                /* DEVICE_ORDINAL */
    case 11: *(CUdeviceptr *)out = entry->base; break;                         /* RANGE_START_ADDR */
    case 12: *(size_t *)out = entry->bytes; break;                             /* RANGE_SIZE */
    case 13: *(int *)out = 1; break;                                           /* MAPPED */
    case 17: *(struct pool **)out = entry->pool; break;                        /* MEMPOOL_HANDLE */
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* Unlike the single query, this one fills in zeroes for an address that the driver does not know. */
static CUresult pointer_attributes(unsigned count, int *which, void **out, CUdeviceptr address)
{
    static const unsigned char width[] = {[1] = 8, [2] = 4, [3] = 8, [4] = 8, [7] = 8, [8] = 4, [9] = 4,
                                          [11] = 8, [12] = 8, [13] = 4, [17] = 8};
    if (!which || !out) return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        if (pointer_attribute(out[i], which[i], address) == CUDA_SUCCESS) continue;
        if (which[i] >= 0 && which[i] < (int)sizeof width && out[i]) memset(out[i], 0, width[which[i]]);
        if (which[i] == 9 && out[i]) *(int *)out[i] = -2; /* CU_DEVICE_INVALID */
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
    CALL(NEEDS_CONTEXT, alloc_linear(out, bytes, LINEAR), "bytes=%zu ptr=0x%llx", bytes, OUT(out));
}
EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
    CALL(NEEDS_CONTEXT, alloc_pitched(out, pitch, width, height, element),
         "width=%zu height=%zu bytes=%llu ptr=0x%llx", width, height, OUT(pitch) * height, OUT(out));
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr address) { CALL(NEEDS_CONTEXT, memory_free(address), "ptr=0x%llx", address); }
EXPORT CUresult cuMemAllocManaged(CUdeviceptr *out, size_t bytes, unsigned flags)
{
    CALL(NEEDS_CONTEXT, alloc_managed(out, bytes, flags), "bytes=%zu flags=%u ptr=0x%llx", bytes, flags, OUT(out));
}
EXPORT CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
    CALL(NEEDS_CONTEXT, alloc_host(out, bytes), "bytes=%zu flags=%u ptr=0x%llx", bytes, flags, OUT(out));
}
EXPORT CUresult cuMemAllocHost_v2(void **out, size_t bytes)
{
    CALL(NEEDS_CONTEXT, alloc_host(out, bytes), "bytes=%zu ptr=0x%llx", bytes, OUT(out));
}
EXPORT CUresult cuMemFreeHost(void *pointer) { CALL(NEEDS_CONTEXT, free_host(pointer), "ptr=%p", pointer); }
EXPORT CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned flags)
{
    CALL(NEEDS_CONTEXT, host_register(pointer, bytes), "ptr=%p bytes=%zu flags=%u", pointer, bytes, flags);
}
EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned flags)
{
    CALL(NEEDS_CONTEXT, host_register(pointer, bytes), "ptr=%p bytes=%zu flags=%u", pointer, bytes, flags);
}
EXPORT CUresult cuMemHostUnregister(void *pointer) { CALL(NEEDS_CONTEXT, host_unregister(pointer), "ptr=%p", pointer); }
EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { QUERY(NEEDS_CONTEXT, get_info(free_bytes, total)); }
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    QUERY(NEEDS_CONTEXT, address_range(base, bytes, address));
}
EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *pointer, unsigned flags)
{
    (void)flags;
    QUERY(NEEDS_CONTEXT, host_device_pointer(out, pointer));
}
EXPORT CUresult cuMemHostGetFlags(unsigned *flags, void *pointer)
{
    QUERY(NEEDS_CONTEXT, flags && book_at((CUdeviceptr)(uintptr_t)pointer) ? (*flags = 0, CUDA_SUCCESS)
                                                                           : CUDA_ERROR_INVALID_VALUE);
}
EXPORT CUresult cuPointerGetAttribute(void *out, int which, CUdeviceptr address)
{
    QUERY(NEEDS_CONTEXT, pointer_attribute(out, which, address));
}
EXPORT CUresult cuPointerGetAttributes(unsigned count, int *which, void **out, CUdeviceptr address)
{
    QUERY(NEEDS_CONTEXT, pointer_attributes(count, which, out, address));
}

/* The 32-bit ABI of CUDA 2.x. A device address does not fit, so like a 64-bit driver these only ever fail or, for NULL, do
 * nothing; what matters is that they exist and that their arguments are narrow. */
EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *out, unsigned bytes)
{
    CALL(NEEDS_CONTEXT, out ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE, "bytes=%u", bytes);
}
EXPORT CUresult cuMemFree(CUdeviceptr_v1 address)
{
    CALL(NEEDS_CONTEXT, address ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS, "ptr=0x%x", address);
}
static CUresult get_info_v1(unsigned *free_bytes, unsigned *total)
{
    size_t f, t;
    get_info(&f, &t);
    if (free_bytes) *free_bytes = f > UINT32_MAX ? UINT32_MAX : (unsigned)f;
    if (total) *total = t > UINT32_MAX ? UINT32_MAX : (unsigned)t;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemGetInfo(unsigned *free_bytes, unsigned *total)
{
    QUERY(NEEDS_CONTEXT, get_info_v1(free_bytes, total));
}
EXPORT CUresult cuMemAllocHost(void **out, unsigned bytes)
{
    CALL(NEEDS_CONTEXT, alloc_host(out, bytes), "bytes=%u ptr=0x%llx", bytes, OUT(out));
}

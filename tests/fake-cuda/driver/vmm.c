/* Virtual memory management: physical handles, address reservations and the maps between them; and IPC.
 *
 * Physical memory lives while its handle count or a map of it lives; reserving and mapping cost nothing. */
#define _GNU_SOURCE
#include "fake.h"

#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define GRANULARITY (2 * MIB)

struct physical {
    struct physical *next;
    CUmemGenericAllocationHandle handle;
    size_t bytes;
    CUmemAllocationProp prop;
    unsigned references, maps;
    bool charged; /* imported and host memory is not ours to count */
};
struct reservation {
    struct reservation *next;
    CUdeviceptr base;
    size_t bytes;
};
struct map {
    struct map *next;
    CUdeviceptr base;
    size_t bytes;
    struct physical *physical;
    unsigned long long access;
};

static struct physical *physicals;
static struct reservation *reservations;
static struct map *maps;
static CUmemGenericAllocationHandle next_handle = 0x10;

static struct physical *find(CUmemGenericAllocationHandle handle)
{
    for (struct physical *p = physicals; p; p = p->next)
        if (p->handle == handle && p->references) return p;
    return NULL;
}

static CUmemGenericAllocationHandle add(struct physical made)
{
    struct physical *physical = malloc(sizeof *physical);
    if (!physical) abort();
    *physical = made;
    physical->next = physicals;
    physical->references = 1;
    physical->handle = next_handle;
    next_handle += 0x10;
    physicals = physical;
    return physical->handle;
}

static void collect(struct physical *physical)
{
    if (physical->references || physical->maps) return;
    if (physical->charged) device_refund(physical->prop.location.id, physical->bytes);
    struct physical **at = &physicals;
    while (*at != physical) at = &(*at)->next;
    *at = physical->next;
    free(physical);
}

static CUresult create(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop, cuuint64_t flags)
{
    if (!out || !prop || flags || !bytes || bytes % GRANULARITY) return CUDA_ERROR_INVALID_VALUE;
    if (prop->type != 1) return CUDA_ERROR_INVALID_VALUE; /* CU_MEM_ALLOCATION_TYPE_PINNED */
    bool on_device = prop->location.type == LOCATION_DEVICE;
    if (on_device && !device_valid(prop->location.id)) return CUDA_ERROR_INVALID_DEVICE;
    if (!on_device && (prop->location.type < LOCATION_HOST || prop->location.type > LOCATION_HOST_NUMA_CURRENT))
        return CUDA_ERROR_INVALID_VALUE;
    if (on_device && (bytes > device_total(prop->location.id) || !device_charge(prop->location.id, bytes)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = add((struct physical){.bytes = bytes, .prop = *prop, .charged = on_device});
    return CUDA_SUCCESS;
}

static CUresult release(CUmemGenericAllocationHandle handle)
{
    struct physical *physical = find(handle);
    if (!physical) return CUDA_ERROR_INVALID_VALUE;
    physical->references--;
    collect(physical);
    return CUDA_SUCCESS;
}

static struct map *map_at(CUdeviceptr address)
{
    for (struct map *m = maps; m; m = m->next)
        if (address >= m->base && address < m->base + m->bytes) return m;
    return NULL;
}

bool vmm_range(CUdeviceptr address, CUdeviceptr *base, size_t *bytes, int *device)
{
    struct map *map = map_at(address);
    if (!map) return false;
    *base = map->base;
    *bytes = map->bytes;
    *device = map->physical->prop.location.type == LOCATION_DEVICE ? map->physical->prop.location.id : -1;
    return true;
}

static CUresult retain(CUmemGenericAllocationHandle *out, void *address)
{
    struct map *map = map_at((CUdeviceptr)(uintptr_t)address);
    if (!out || !map) return CUDA_ERROR_INVALID_VALUE;
    map->physical->references++;
    *out = map->physical->handle;
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *out, size_t bytes, size_t align, CUdeviceptr wanted)
{
    if (!out || !bytes || bytes % GRANULARITY || (align & (align - 1))) return CUDA_ERROR_INVALID_VALUE;
    space_note_context(); /* VMM needs no context */
    CUdeviceptr base = space_reserve(bytes, align < GRANULARITY ? GRANULARITY : align, wanted);
    struct reservation *reservation = base ? malloc(sizeof *reservation) : NULL;
    if (!reservation) return CUDA_ERROR_OUT_OF_MEMORY;
    *reservation = (struct reservation){reservations, base, bytes};
    reservations = reservation;
    *out = base;
    return CUDA_SUCCESS;
}

static CUresult unreserve(CUdeviceptr base, size_t bytes)
{
    for (struct map *m = maps; m; m = m->next)
        if (m->base < base + bytes && base < m->base + m->bytes) return CUDA_ERROR_INVALID_VALUE;
    for (struct reservation **at = &reservations; *at; at = &(*at)->next) {
        struct reservation *reservation = *at;
        if (reservation->base != base || reservation->bytes != bytes) continue;
        *at = reservation->next;
        space_unreserve(base, bytes);
        free(reservation);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static bool reserved(CUdeviceptr base, size_t bytes)
{
    for (struct reservation *r = reservations; r; r = r->next)
        if (base >= r->base && base - r->base <= r->bytes && bytes <= r->bytes - (base - r->base)) return true;
    return false;
}

static CUresult map(CUdeviceptr base, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle)
{
    struct physical *physical = find(handle);
    if (!physical || !bytes || bytes % GRANULARITY || base % GRANULARITY || offset) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > physical->bytes || !reserved(base, bytes)) return CUDA_ERROR_INVALID_VALUE;
    for (struct map *m = maps; m; m = m->next)
        if (m->base < base + bytes && base < m->base + m->bytes) return CUDA_ERROR_INVALID_VALUE;
    struct map *made = malloc(sizeof *made);
    if (!made) return CUDA_ERROR_OUT_OF_MEMORY;
    *made = (struct map){maps, base, bytes, physical, 0};
    maps = made;
    physical->maps++;
    return CUDA_SUCCESS;
}

/* How many bytes of the range are mapped, or SIZE_MAX if a map lies across its border. */
static size_t covered(CUdeviceptr base, size_t bytes)
{
    size_t sum = 0;
    for (struct map *m = maps; m; m = m->next) {
        if (m->base >= base + bytes || base >= m->base + m->bytes) continue;
        if (m->base < base || m->base + m->bytes > base + bytes) return SIZE_MAX;
        sum += m->bytes;
    }
    return sum;
}

static CUresult unmap(CUdeviceptr base, size_t bytes)
{
    if (!bytes || covered(base, bytes) != bytes) return CUDA_ERROR_INVALID_VALUE;
    for (struct map **at = &maps; *at;) {
        struct map *m = *at;
        if (m->base < base || m->base >= base + bytes) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        m->physical->maps--;
        collect(m->physical);
        free(m);
    }
    return CUDA_SUCCESS;
}

static CUresult set_access(CUdeviceptr base, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    if (!access || !count || !bytes || covered(base, bytes) != bytes) return CUDA_ERROR_INVALID_VALUE;
    for (struct map *m = maps; m; m = m->next)
        if (m->base >= base && m->base < base + bytes) m->access = (unsigned long long)access[0].flags;
    return CUDA_SUCCESS;
}

static CUresult get_access(unsigned long long *out, CUdeviceptr address)
{
    struct map *m = map_at(address);
    if (!out || !m) return CUDA_ERROR_INVALID_VALUE;
    *out = m->access;
    return CUDA_SUCCESS;
}

static CUresult properties(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle)
{
    struct physical *physical = find(handle);
    if (!out || !physical) return CUDA_ERROR_INVALID_VALUE;
    *out = physical->prop;
    return CUDA_SUCCESS;
}

static CUresult granularity(size_t *out, const CUmemAllocationProp *prop)
{
    if (!out || !prop) return CUDA_ERROR_INVALID_VALUE;
    *out = GRANULARITY;
    return CUDA_SUCCESS;
}

/* What a shared file descriptor or IPC handle says about the memory behind it. */
struct shared {
    char magic[8];
    long pid;
    CUdeviceptr base; /* IPC only */
    size_t bytes;
    CUmemAllocationProp prop;
};
#define MAGIC "fakecuda"

static CUresult export_handle(void *out, CUmemGenericAllocationHandle handle, int type)
{
    struct physical *physical = find(handle);
    if (!out || !physical || !(type & physical->prop.requested_handle_types)) return CUDA_ERROR_INVALID_VALUE;
    if (type != 1) return CUDA_ERROR_NOT_SUPPORTED; /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
    struct shared shared = {MAGIC, getpid(), 0, physical->bytes, physical->prop};
    int fd = memfd_create("fake-cuda-handle", MFD_CLOEXEC);
    if (fd < 0 || write(fd, &shared, sizeof shared) != sizeof shared) return CUDA_ERROR_UNKNOWN;
    *(int *)out = fd;
    return CUDA_SUCCESS;
}

static CUresult import_handle(CUmemGenericAllocationHandle *out, void *handle, int type)
{
    struct shared shared;
    if (!out || type != 1) return CUDA_ERROR_INVALID_VALUE;
    if (pread((int)(intptr_t)handle, &shared, sizeof shared, 0) != sizeof shared || memcmp(shared.magic, MAGIC, 8) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *out = add((struct physical){.bytes = shared.bytes, .prop = shared.prop});
    return CUDA_SUCCESS;
}

static CUresult ipc_get(CUipcMemHandle *out, CUdeviceptr address)
{
    struct allocation *entry = book_at(address);
    if (!out || !entry || entry->kind != LINEAR) return CUDA_ERROR_INVALID_VALUE;
    struct shared shared = {MAGIC, getpid(), entry->base, entry->bytes, {0}};
    _Static_assert(offsetof(struct shared, prop) <= sizeof out->bytes, "an IPC handle has 64 bytes");
    memset(out, 0, sizeof *out);
    memcpy(out, &shared, offsetof(struct shared, prop));
    return CUDA_SUCCESS;
}

static CUresult ipc_open(CUdeviceptr *out, CUipcMemHandle handle)
{
    struct shared shared;
    memcpy(&shared, &handle, offsetof(struct shared, prop));
    if (!out || memcmp(shared.magic, MAGIC, 8) != 0) return CUDA_ERROR_INVALID_VALUE;
    if (shared.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT; /* not for the process that made it */
    size_t extent = round_up(shared.bytes, GRANULARITY);
    CUdeviceptr base = space_reserve(extent, GRANULARITY, 0);
    if (!base) return CUDA_ERROR_MAP_FAILED;
    struct context *context = context_current();
    book_add((struct allocation){.base = base, .bytes = shared.bytes, .extent = extent, .kind = IMPORTED,
                                 .device = context->device, .context = context});
    *out = base;
    return CUDA_SUCCESS;
}

static CUresult ipc_close(CUdeviceptr address)
{
    struct allocation *entry = book_starting_at(address);
    if (!entry || entry->kind != IMPORTED) return CUDA_ERROR_INVALID_VALUE;
    memory_release(entry);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *prop,
                            cuuint64_t flags)
{
    CALL(NEEDS_INIT, create(out, bytes, prop, flags), "bytes=%zu location=%d:%d handle=0x%llx", bytes,
         prop ? prop->location.type : 0, prop ? prop->location.id : 0, OUT(out));
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { CALL(NEEDS_INIT, release(handle), "handle=0x%llx", handle); }
EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    CALL(NEEDS_INIT, retain(out, address), "ptr=%p handle=0x%llx", address, OUT(out));
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t align, CUdeviceptr wanted, cuuint64_t flags)
{
    (void)flags;
    CALL(NEEDS_INIT, reserve(out, bytes, align, wanted), "bytes=%zu ptr=0x%llx", bytes, OUT(out));
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr base, size_t bytes)
{
    CALL(NEEDS_INIT, unreserve(base, bytes), "ptr=0x%llx bytes=%zu", base, bytes);
}
EXPORT CUresult cuMemMap(CUdeviceptr base, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, cuuint64_t flags)
{
    CALL(NEEDS_INIT, flags ? CUDA_ERROR_INVALID_VALUE : map(base, bytes, offset, handle),
         "ptr=0x%llx bytes=%zu offset=%zu handle=0x%llx", base, bytes, offset, handle);
}
EXPORT CUresult cuMemUnmap(CUdeviceptr base, size_t bytes)
{
    CALL(NEEDS_INIT, unmap(base, bytes), "ptr=0x%llx bytes=%zu", base, bytes);
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr base, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    CALL(NEEDS_INIT, set_access(base, bytes, access, count), "ptr=0x%llx bytes=%zu", base, bytes);
}
EXPORT CUresult cuMemGetAccess(unsigned long long *out, const CUmemLocation *location, CUdeviceptr address)
{
    (void)location;
    QUERY(NEEDS_INIT, get_access(out, address));
}
EXPORT CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *prop, int option)
{
    (void)option;
    QUERY(NEEDS_INIT, granularity(out, prop));
}
EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle)
{
    QUERY(NEEDS_INIT, properties(out, handle));
}
EXPORT CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type, cuuint64_t flags)
{
    (void)flags;
    CALL(NEEDS_INIT, export_handle(out, handle, type), "handle=0x%llx type=%d", handle, type);
}
EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *handle, int type)
{
    CALL(NEEDS_INIT, import_handle(out, handle, type), "type=%d handle=0x%llx", type, OUT(out));
}
EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address)
{
    CALL(NEEDS_CONTEXT, ipc_get(out, address), "ptr=0x%llx", address);
}
EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    CALL(NEEDS_CONTEXT, ipc_open(out, handle), "flags=%u ptr=0x%llx", flags, OUT(out));
}
EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned flags)
{
    CALL(NEEDS_CONTEXT, ipc_open(out, handle), "flags=%u ptr=0x%llx", flags, OUT(out));
}
EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr address) { CALL(NEEDS_CONTEXT, ipc_close(address), "ptr=0x%llx", address); }

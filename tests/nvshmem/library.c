/* Stands in for libnvshmem_host.so: the exported functions of its symmetric heap (host/nvshmem_api.h), one heap of 64 MiB of
 * cuMemCreate, handed out from its beginning on. */
#include <stddef.h>
#include <stdint.h>

enum { HEAP = 64 << 20 };
static unsigned long long base;
static size_t used;

extern int cuMemAddressReserve(unsigned long long *, size_t, size_t, unsigned long long, unsigned long long);
extern int cuMemCreate(unsigned long long *, size_t, const void *, unsigned long long);
extern int cuMemMap(unsigned long long, size_t, size_t, unsigned long long, unsigned long long);

struct properties {
    int type, handle_types;
    struct { int type, id; } location;
    void *win32;
    unsigned char flags[32];
};

static int start(void)
{
    struct properties properties = {.type = 1, .location = {1, 0}};
    unsigned long long handle;
    return base != 0 || (cuMemAddressReserve(&base, HEAP, 0, 0, 0) == 0 && cuMemCreate(&handle, HEAP, &properties, 0) == 0 &&
                         cuMemMap(base, HEAP, 0, handle, 0) == 0);
}

static void *give(size_t size)
{
    if (size == 0 || !start() || used + size > HEAP) return NULL;
    void *given = (void *)(uintptr_t)(base + used);
    used += size;
    return given;
}

void *nvshmem_malloc(size_t size) { return give(size); }

void *nvshmem_calloc(size_t count, size_t size) { return give(count * size); }

void *nvshmem_align(size_t alignment, size_t size)
{
    used = (used + alignment - 1) / alignment * alignment;
    return give(size);
}

void nvshmem_free(void *pointer) { (void)pointer; }

/* Whom it hears from, so that a test sees that each call came here once. */
size_t nvshmem_used(void) { return used; }

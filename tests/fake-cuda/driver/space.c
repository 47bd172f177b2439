/* Which address a request gets, as a real driver (580, H200) was seen to choose it.
 *
 * Memory comes from regions: a multiple of 32 MiB, at the top of the highest gap of the address space that is at least 32 MiB
 * larger, below what was mapped when the first context was made. A request of 2 MiB or more takes whole 2 MiB units: from
 * the newest region that has a hole, there the smallest hole, the lowest of equals. Smaller requests share 2 MiB blocks in
 * units of 512 bytes: the smallest hole of all blocks, of equals the one that has been a hole for longest. A region or block
 * whose last user is gone goes back at once.
 *
 *   ... | gap        | region 2 | region 1 | slack | libraries ... | stack
 *                     ^ newest              ^ below the lowest mapping at context creation
 *
 * Regions are PROT_NONE mappings, so they show in /proc/self/maps and touching device memory faults, as it should. */
#define _GNU_SOURCE
#include "fake.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define REGION (32 * MIB)
#define UNIT (2 * MIB)
#define SMALL_UNIT ((size_t)512)

struct hole {
    struct hole *next;
    CUdeviceptr start;
    size_t bytes;
};

static struct {
    struct span *regions;      /* newest first */
    struct hole *small_holes; /* in the blocks of small allocations, oldest first */
} devices[MAX_DEVICES];
static CUdeviceptr ceiling;

struct gap {
    CUdeviceptr start, end;
};

/* The gaps between mappings, lowest first; NULL when /proc is not there. */
static struct gap *read_gaps(size_t *count)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    if (!maps) return NULL;
    size_t capacity = 256;
    struct gap *gaps = malloc(capacity * sizeof *gaps);
    CUdeviceptr previous_end = 64 * KIB, start, end;
    char line[4096 + 128];
    *count = 0;
    while (gaps && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%llx-%llx", &start, &end) != 2) continue;
        if (start > (CUdeviceptr)1 << 63) break; /* vsyscall */
        if (start > previous_end) {
            if (*count == capacity) {
                capacity *= 2;
                struct gap *grown = realloc(gaps, capacity * sizeof *gaps);
                if (!grown) break;
                gaps = grown;
            }
            gaps[(*count)++] = (struct gap){previous_end, start};
        }
        if (end > previous_end) previous_end = end;
    }
    fclose(maps);
    return gaps;
}

/* The wide gap between the heap and what the kernel maps from the top down; the one below the program is wider still. */
#define WIDE ((CUdeviceptr)1 << 40)

void space_note_context(void)
{
    if (ceiling) return;
    size_t count = 0;
    struct gap *gaps = read_gaps(&count);
    for (size_t i = count; i-- > 0 && !ceiling;)
        if (gaps[i].end - gaps[i].start >= WIDE) ceiling = gaps[i].end;
    if (!ceiling) ceiling = (CUdeviceptr)1 << 46;
    free(gaps);
}

static CUdeviceptr map_at(CUdeviceptr address, size_t bytes)
{
    void *got = mmap((void *)(uintptr_t)address, bytes, PROT_NONE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got == MAP_FAILED) return 0;
    if ((CUdeviceptr)(uintptr_t)got == address) return address;
    munmap(got, bytes); /* a kernel before 4.17 takes the address for a hint */
    return 0;
}

/* Without /proc: downwards from where nothing is mapped in most processes. */
static CUdeviceptr reserve_blindly(size_t bytes, size_t align)
{
    static CUdeviceptr end = (CUdeviceptr)1 << 45;
    CUdeviceptr start = end;
    for (int attempt = 0; attempt < 1024 && start > bytes + align; attempt++) {
        start = (start - bytes) & ~(CUdeviceptr)(align - 1);
        if (map_at(start, bytes)) return end = start;
    }
    return 0;
}

/* `bytes` of address space, not more. `align` is a power of two. */
CUdeviceptr space_reserve(size_t bytes, size_t align, CUdeviceptr wanted)
{
    if (wanted && wanted % align == 0) {
        CUdeviceptr got = map_at(wanted, bytes);
        if (got) return got;
    }
    /* Another thread may map between look and leap; and an emulator has mappings that it does not show, of up to a gigabyte. */
    CUdeviceptr below = ceiling;
    for (int attempt = 0; attempt < 8; attempt++) {
        size_t count = 0;
        struct gap *gaps = read_gaps(&count);
        CUdeviceptr address = 0;
        if (!gaps) return reserve_blindly(bytes, align);
        for (size_t i = count; i-- > 0 && !address;) {
            if (gaps[i].end > ceiling || gaps[i].start >= below) continue;
            CUdeviceptr end = gaps[i].end < below ? gaps[i].end : below;
            size_t room = end - gaps[i].start;
            if (room > align && room - align >= bytes) address = (end - bytes) & ~(CUdeviceptr)(align - 1);
        }
        free(gaps);
        if (!address) return 0;
        if (map_at(address, bytes)) return address;
        if (attempt) below = address > (REGION << attempt) ? address - (REGION << attempt) : 0;
    }
    return 0;
}

void space_unreserve(CUdeviceptr base, size_t bytes) { munmap((void *)(uintptr_t)base, bytes); }

static void drop(struct span **list, struct span *span)
{
    while (*list != span) list = &(*list)->next;
    *list = span->next;
    span_delete(span);
}

static struct span *new_region(int device, size_t bytes)
{
    size_t size = round_up(bytes, REGION);
    CUdeviceptr base = space_reserve(size, REGION, 0);
    struct span *region = base ? span_new(base, size, UNIT) : NULL;
    if (!region) {
        if (base) space_unreserve(base, size);
        return NULL;
    }
    region->next = devices[device].regions;
    devices[device].regions = region;
    return region;
}

static CUdeviceptr take_units(int device, size_t bytes)
{
    size_t start = 0, hole, units = bytes / UNIT;
    struct span *region = devices[device].regions;
    while (region && !span_find(region, units, &start, &hole)) region = region->next;
    if (!region && !(region = new_region(device, bytes))) return 0;
    span_take(region, start, units);
    return region->base + start * UNIT;
}

static void give_units(int device, CUdeviceptr base, size_t bytes)
{
    struct span *region = devices[device].regions;
    while (base < region->base || base >= region->base + region->units * UNIT) region = region->next;
    span_give(region, (base - region->base) / UNIT, bytes / UNIT);
    if (region->free_units < region->units) return;
    space_unreserve(region->base, region->units * UNIT);
    drop(&devices[device].regions, region);
}

static CUresult alloc_large(int device, size_t bytes, CUdeviceptr *base)
{
    if (!device_charge(device, bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    *base = take_units(device, bytes);
    if (*base) return CUDA_SUCCESS;
    device_refund(device, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static void add_hole(int device, CUdeviceptr start, size_t bytes)
{
    struct hole *made = malloc(sizeof *made), **at = &devices[device].small_holes;
    if (!made) abort();
    *made = (struct hole){NULL, start, bytes};
    while (*at) at = &(*at)->next;
    *at = made;
}

/* Takes the hole out of the list; what it was is returned. */
static struct hole take_hole(struct hole **at)
{
    struct hole *gone = *at, copy = *gone;
    *at = gone->next;
    free(gone);
    return copy;
}

static CUresult alloc_small(int device, size_t bytes, CUdeviceptr *base)
{
    struct hole **best = NULL;
    for (struct hole **at = &devices[device].small_holes; *at; at = &(*at)->next)
        if ((*at)->bytes >= bytes && (!best || (*at)->bytes < (*best)->bytes)) best = at;
    struct hole hole = {.bytes = UNIT};
    if (best) {
        hole = take_hole(best);
    } else {
        CUresult result = alloc_large(device, UNIT, &hole.start);
        if (result != CUDA_SUCCESS) return result;
    }
    if (hole.bytes > bytes) add_hole(device, hole.start + bytes, hole.bytes - bytes);
    *base = hole.start;
    return CUDA_SUCCESS;
}

/* Merges with the holes before and after in the same block; an empty block goes back. */
static void free_small(int device, CUdeviceptr start, size_t bytes)
{
    CUdeviceptr block = start / UNIT * UNIT, end = start + bytes;
    for (struct hole **at = &devices[device].small_holes; *at;) {
        bool before = (*at)->start + (*at)->bytes == start && start != block;
        bool after = (*at)->start == end && end != block + UNIT;
        if (!before && !after) {
            at = &(*at)->next;
            continue;
        }
        struct hole hole = take_hole(at);
        if (before) start = hole.start;
        else end = hole.start + hole.bytes;
    }
    if (end - start < UNIT) {
        add_hole(device, start, end - start);
        return;
    }
    give_units(device, block, UNIT);
    device_refund(device, UNIT);
}

CUresult space_alloc(int device, size_t bytes, CUdeviceptr *base, size_t *extent)
{
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    if (bytes > device_total(device)) return CUDA_ERROR_OUT_OF_MEMORY;
    *extent = round_up(bytes, SMALL_UNIT);
    if (*extent < UNIT) return alloc_small(device, *extent, base);
    *extent = round_up(bytes, UNIT);
    return alloc_large(device, *extent, base);
}

void space_free(int device, CUdeviceptr base, size_t extent)
{
    if (extent >= UNIT) {
        give_units(device, base, extent);
        device_refund(device, extent);
        return;
    }
    free_small(device, base, extent);
}

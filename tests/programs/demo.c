//! A little training loop on one GPU, for a first look at gputrace on a machine that has none.
//!
//! It needs nothing but a C library and, at run time, libcuda.so.1 (the fake one will do): weights, optimizer state and
//! communication buffers at the start; then steps that take activations from cached segments, like PyTorch does; sequences that
//! grow, so that old segments no longer fit; one small buffer a step that nobody frees; and at the end a request that fails
//! until the cache is given back.
//# Link: none
//# Env: FAKE_CUDA_MEMORY=2GiB
//# Expect: cuMemAlloc_v2 268435456 freed
//# Expect: cuMemAlloc_v2 536870912 freed
//# Expect: cuMemCreate 33554432 freed x2
//# Expect: cuMemHostAlloc 16777216 freed
//# Expect: cuMemAlloc_v2 20971520 freed
//# Expect: cuMemAlloc_v2 41943040 freed
//# Expect: cuMemAlloc_v2 62914560 freed
//# Expect: cuMemAlloc_v2 83886080 freed
//# Expect: cuMemAlloc_v2 104857600 freed
//# Expect: cuMemAlloc_v2 125829120 freed
//# Expect: cuMemAlloc_v2 146800640 freed
//# Expect: cuMemAlloc_v2 167772160 freed
//# Expect: cuMemAlloc_v2 262144 leaked x24
//# Expect: cuMemAlloc_v2 734003200 failed:2
//# Expect: cuMemAlloc_v2 734003200 freed
#include "api.h"

#include <dlfcn.h>

static struct {
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*alloc)(CUdeviceptr *, size_t);
    int (*free)(CUdeviceptr);
    int (*host_alloc)(void **, size_t, unsigned);
    int (*host_free)(void *);
    int (*create)(CUhandle *, size_t, const CUmemAllocationProp *, unsigned long long);
    int (*release)(CUhandle);
    int (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    int (*map)(CUdeviceptr, size_t, size_t, CUhandle, unsigned long long);
    int (*unmap)(CUdeviceptr, size_t);
    int (*unreserve)(CUdeviceptr, size_t);
    int (*info)(size_t *, size_t *);
} cu;

static void load_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "demo: %s\n", dlerror());
        exit(1);
    }
#define LOAD(field, name) CHECK(*(void **)&cu.field = dlsym(driver, name))
    LOAD(init, "cuInit");
    LOAD(retain, "cuDevicePrimaryCtxRetain");
    LOAD(set_current, "cuCtxSetCurrent");
    LOAD(alloc, "cuMemAlloc_v2");
    LOAD(free, "cuMemFree_v2");
    LOAD(host_alloc, "cuMemHostAlloc");
    LOAD(host_free, "cuMemFreeHost");
    LOAD(create, "cuMemCreate");
    LOAD(release, "cuMemRelease");
    LOAD(reserve, "cuMemAddressReserve");
    LOAD(map, "cuMemMap");
    LOAD(unmap, "cuMemUnmap");
    LOAD(unreserve, "cuMemAddressFree");
    LOAD(info, "cuMemGetInfo_v2");
}

/* A cache of segments, as a framework keeps one: the first that is large enough serves, none is given back. */
static struct segment {
    CUdeviceptr start;
    size_t bytes;
    int used;
} segments[64];
static int n_segments;

__attribute__((noinline)) static int new_segment(size_t bytes)
{
    struct segment *segment = &segments[n_segments];
    if (cu.alloc(&segment->start, bytes) != 0) return -1;
    segment->bytes = bytes;
    return n_segments++;
}

__attribute__((noinline)) static void empty_cache(void)
{
    int kept = 0;
    for (int i = 0; i < n_segments; i++) {
        if (segments[i].used) segments[kept++] = segments[i];
        else OK(cu.free(segments[i].start));
    }
    n_segments = kept;
}

static int take(size_t bytes)
{
    int found = 0;
    while (found < n_segments && (segments[found].used || segments[found].bytes < bytes)) found++;
    if (found == n_segments) found = new_segment(bytes);
    if (found < 0) {
        puts("out of memory; giving the cache back");
        empty_cache();
        CHECK((found = new_segment(bytes)) >= 0);
    }
    segments[found].used = 1;
    return found;
}

struct communicator {
    CUhandle handle[2];
    CUdeviceptr base[2];
};
#define CHANNEL (32 * MIB)

__attribute__((noinline)) static void open_communicator(struct communicator *comm)
{
    CUmemAllocationProp prop = {.type = 1, .location = {1, 0}};
    for (int i = 0; i < 2; i++) {
        OK(cu.create(&comm->handle[i], CHANNEL, &prop, 0));
        OK(cu.reserve(&comm->base[i], CHANNEL, 0, 0, 0));
        OK(cu.map(comm->base[i], CHANNEL, 0, comm->handle[i], 0));
    }
}

static void close_communicator(struct communicator *comm)
{
    for (int i = 0; i < 2; i++) {
        OK(cu.unmap(comm->base[i], CHANNEL));
        OK(cu.release(comm->handle[i]));
        OK(cu.unreserve(comm->base[i], CHANNEL));
    }
}

/* The leak: each step's statistics get a buffer, and nobody keeps its address. */
__attribute__((noinline)) static void keep_statistics(void)
{
    CUdeviceptr forgotten;
    OK(cu.alloc(&forgotten, 256 * KIB));
}

__attribute__((noinline)) static void train_step(int step)
{
    size_t activations = 20 * MIB * (size_t)(1 + step / 3); /* sequences grow */
    int forward = take(activations);
    keep_statistics();
    segments[forward].used = 0;
}

int main(void)
{
    void *context, *loader;
    CUdeviceptr weights, optimizer;
    struct communicator comm;
    size_t free_bytes, total;
    load_driver();
    OK(cu.init(0));
    OK(cu.retain(&context, 0));
    OK(cu.set_current(context));
    OK(cu.alloc(&weights, 256 * MIB));
    OK(cu.alloc(&optimizer, 512 * MIB));
    open_communicator(&comm);
    OK(cu.host_alloc(&loader, 16 * MIB, 0));

    for (int step = 0; step < 24; step++) train_step(step);
    OK(cu.info(&free_bytes, &total));
    printf("24 steps, %zu of %zu MiB in use\n", (total - free_bytes) / MIB, total / MIB);
    segments[take(700 * MIB)].used = 0; /* evaluation on the longest sequence */
    empty_cache();

    OK(cu.host_free(loader));
    close_communicator(&comm);
    OK(cu.free(optimizer));
    OK(cu.free(weights));
    puts("done");
    return 0;
}

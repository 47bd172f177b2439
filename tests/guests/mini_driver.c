/* The least that is a driver, without any lock: what a signal handler may call. As on WSL, it looks itself up with dlsym
 * when it is initialised. With VERSIONED its functions have symbol versions. It says at its end how many allocations it
 * made. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long address;
static atomic_uint allocs;
static atomic_ullong next_address = 0x700000000000;

static void *self(void)
{
    Dl_info info;
    dladdr((void *)self, &info);
    return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
}
int cuInit(unsigned flags)
{
    /* Handed a hook for itself, this would go round for ever. */
    int (*found)(unsigned) = dlsym(self(), "cuInit");
    return found == cuInit || flags == 77 ? 0 : found(77);
}
int cuMemAlloc_v2(address *out, size_t bytes)
{
    *out = atomic_fetch_add(&next_address, (bytes + 511) & ~511ULL);
    atomic_fetch_add(&allocs, 1);
    return 0;
}
int cuMemFree_v2(address p) { return p ? 0 : 1; }
int cuCtxGetDevice(int *device) { return *device = 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int length, int device) { return device + snprintf(name, length, "mini") - 4; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 1UL << 40, device; }
__attribute__((constructor)) static void begin(void) { (void)dlsym(self(), "cuMemAlloc_v2"); }
__attribute__((destructor)) static void end(void) { fprintf(stderr, "driver: %u\n", allocs); }

/* A preload that limits device memory, as tools that share GPUs do: it refuses every tenth request. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

int cuMemAlloc_v2(unsigned long long *out, size_t bytes)
{
    static int (*next)(unsigned long long *, size_t);
    static unsigned long count;
    if (!next) next = (int (*)(unsigned long long *, size_t))dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    if (__atomic_add_fetch(&count, 1, __ATOMIC_RELAXED) % 10 == 0) return 2;
    return next(out, bytes);
}

/* A library that gets memory by the dlsym that it sees. */
#include <dlfcn.h>
#include <stddef.h>

int run(void)
{
    unsigned long long p;
    int (*alloc)(unsigned long long *, size_t) = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAlloc_v2");
    return alloc(&p, 54321);
}

//! The driver through dlopen and dlsym, as Triton and CuPy use it; dlsym and dlvsym give the same pointers.
//# Link: none
//# Expect: cuMemAlloc_v2 1048576 freed
//# Expect: cuMemAllocAsync_ptsz 2048 freed
#define _GNU_SOURCE
#include "api.h"

#include <dlfcn.h>

static void *driver;

static void *symbol(const char *name)
{
    void *found = dlsym(driver, name);
    CHECK(found);
    return found;
}

int main(void)
{
    void *context;
    CUdeviceptr p;
    /* Programs ask so whether there is a driver at all. */
    CHECK(!dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") && strstr(dlerror(), "cuMemAlloc_v2"));
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(driver);
    CHECK(!dlsym(driver, "cuNoSuchFunction") && strstr(dlerror(), "cuNoSuchFunction"));
    CHECK(symbol("cuMemAlloc") != symbol("cuMemAlloc_v2"));
    CHECK(symbol("cuMemAllocAsync") != symbol("cuMemAllocAsync_ptsz"));
    OK(((int (*)(unsigned))symbol("cuInit"))(0));
    OK(((int (*)(void **, int))symbol("cuDevicePrimaryCtxRetain"))(&context, 0));
    OK(((int (*)(void *))symbol("cuCtxSetCurrent"))(context));
    OK(((int (*)(CUdeviceptr *, size_t))symbol("cuMemAlloc_v2"))(&p, MIB));
    OK(((int (*)(CUdeviceptr))symbol("cuMemFree_v2"))(p));
    OK(((int (*)(CUdeviceptr *, size_t, void *))symbol("cuMemAllocAsync_ptsz"))(&p, 2048, NULL));
    OK(((int (*)(CUdeviceptr, void *))symbol("cuMemFreeAsync_ptsz"))(p, NULL));
    return 0;
}

//! cuGetProcAddress in both ABIs, with every flag: which export each answer is, and calls through the answers.
//# Link: cuda
//# Expect: cuMemAlloc_v2 1000 freed
//# Expect: cuMemAllocAsync 2000 freed
//# Expect: cuMemAllocAsync_ptsz 3000 freed
#define _GNU_SOURCE
#include "api.h"

#include <dlfcn.h>

static void *v2(const char *name, int version, unsigned long long flags, int expected)
{
    void *found = (void *)1;
    int status = -1;
    RETURNS(expected == 0 ? 0 : 500, cuGetProcAddress_v2(name, &found, version, flags, &status));
    CHECK(status == expected);
    return found;
}

static void *v1(const char *name, int version, unsigned long long flags)
{
    void *found = (void *)1;
    OK(cuGetProcAddress(name, &found, version, flags));
    return found;
}

#define EXPORT(name) dlsym(RTLD_DEFAULT, name)

int main(void)
{
    CUdeviceptr p;
    void *context, *found;
    CHECK(v2("cuMemAlloc", 2000, 0, 0) == EXPORT("cuMemAlloc"));
    CHECK(v2("cuMemAlloc", 3010, 0, 0) == EXPORT("cuMemAlloc"));
    CHECK(v2("cuMemAlloc", 3020, 0, 0) == EXPORT("cuMemAlloc_v2"));
    CHECK(v2("cuMemAlloc", 12000, 2, 0) == EXPORT("cuMemAlloc_v2")); /* no per-thread variant */
    CHECK(v2("cuMemAllocAsync", 11020, 0, 0) == EXPORT("cuMemAllocAsync"));
    CHECK(v2("cuMemAllocAsync", 11020, 1, 0) == EXPORT("cuMemAllocAsync"));
    CHECK(v2("cuMemAllocAsync", 11020, 2, 0) == EXPORT("cuMemAllocAsync_ptsz"));
    CHECK(v2("cuMemPrefetchAsync", 12010, 2, 0) == EXPORT("cuMemPrefetchAsync_ptsz"));
    CHECK(v2("cuMemPrefetchAsync", 12020, 2, 0) == EXPORT("cuMemPrefetchAsync_v2_ptsz"));
    CHECK(v2("cuGetProcAddress", 11030, 0, 0) == EXPORT("cuGetProcAddress"));
    CHECK(v2("cuGetProcAddress", 12000, 0, 0) == EXPORT("cuGetProcAddress_v2"));
    CHECK(v2("cuNoSuchFunction", 12000, 0, 1) == NULL);
    CHECK(v2("cuMemAllocAsync", 11010, 0, 2) == NULL);
    RETURNS(1, cuGetProcAddress_v2("cuMemAlloc", &found, 99000, 0, NULL)); /* newer than the driver */
    OK(cuGetProcAddress_v2("", &found, 0, 0, NULL));                       /* the runtime's first question */
    CHECK(v1("cuMemAlloc", 12000, 0) == EXPORT("cuMemAlloc_v2"));
    CHECK(v1("cuMemAllocAsync", 12000, 2) == EXPORT("cuMemAllocAsync_ptsz"));
    RETURNS(500, cuGetProcAddress("cuNoSuchFunction", &found, 12000, 0));

    OK(((int (*)(unsigned))v2("cuInit", 2000, 0, 0))(0));
    OK(((int (*)(void **, unsigned, int))v2("cuCtxCreate", 3020, 0, 0))(&context, 0, 0));
    OK(((int (*)(CUdeviceptr *, size_t))v1("cuMemAlloc", 3020, 0))(&p, 1000));
    OK(((int (*)(CUdeviceptr))v2("cuMemFree", 3020, 0, 0))(p));
    OK(((int (*)(CUdeviceptr *, size_t, void *))v2("cuMemAllocAsync", 11020, 0, 0))(&p, 2000, NULL));
    OK(((int (*)(CUdeviceptr, void *))v2("cuMemFreeAsync", 11020, 0, 0))(p, NULL));
    OK(((int (*)(CUdeviceptr *, size_t, void *))v2("cuMemAllocAsync", 11020, 2, 0))(&p, 3000, NULL));
    OK(((int (*)(CUdeviceptr, void *))v2("cuMemFreeAsync", 11020, 2, 0))(p, NULL));
    return 0;
}

//! The runtime through dlvsym, by its symbol version. The driver has no versions, so dlvsym finds nothing there.
//# Link: none
//# Args: cudart-12
//# Expect: cudaMalloc 4096 freed
#define _GNU_SOURCE
#include "api.h"

#include <dlfcn.h>

int main(int argc, char **argv)
{
    void *p;
    CHECK(argc == 2);
    void *runtime = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL), *driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(runtime && driver);
    CHECK(dlvsym(runtime, "cudaMalloc", "libcudart.so.12") == dlsym(runtime, "cudaMalloc"));
    CHECK(dlvsym(runtime, "cudaMalloc", "libcudart.so.99") == NULL);
    CHECK(dlvsym(driver, "cuMemAlloc_v2", "libcuda.so.1") == NULL && dlerror());
    OK(((int (*)(void **, size_t))dlvsym(runtime, "cudaMalloc", "libcudart.so.12"))(&p, 4096));
    OK(((int (*)(void *))dlvsym(runtime, "cudaFree", "libcudart.so.12"))(p));
    return 0;
}

//! Two CUDA runtimes in one process, each loaded privately: argv names their files.
//# Link: none
//# Args: cudart-12 cudart-13
//# Expect: cudaMalloc 1200 freed
//# Expect: cudaMalloc 1300 freed
#define _GNU_SOURCE
#include "api.h"

#include <dlfcn.h>

int main(int argc, char **argv)
{
    void *p[2];
    CHECK(argc == 3);
    void *first = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL), *second = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    CHECK(first && second && first != second);
    OK(((int (*)(void **, size_t))dlsym(first, "cudaMalloc"))(&p[0], 1200));
    OK(((int (*)(void **, size_t))dlsym(second, "cudaMalloc"))(&p[1], 1300));
    CHECK(p[0] != p[1]);
    OK(((int (*)(void *))dlsym(first, "cudaFree"))(p[1])); /* one driver behind both */
    OK(((int (*)(void *))dlsym(second, "cudaFree"))(p[0]));
    return 0;
}

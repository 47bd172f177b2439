/* A program that gets memory twelve times and gives it back, by the route that its first argument names: elf, dlsym,
 * proc. The last request is for more than limiters allow. Prints what each call returned. */
#define _GNU_SOURCE
#include "../programs/api.h"
#include <dlfcn.h>

int main(int argc, char **argv)
{
    const char *route = argc > 1 ? argv[1] : "elf";
    int (*alloc)(CUdeviceptr *, size_t) = cuMemAlloc_v2, (*release)(CUdeviceptr) = cuMemFree_v2;
    void *context;
    if (strcmp(route, "elf") != 0) {
        void *handle = dlopen("libcuda.so.1", RTLD_NOW);
        alloc = dlsym(handle, "cuMemAlloc_v2");
        release = dlsym(handle, "cuMemFree_v2");
        if (strcmp(route, "proc") == 0) {
            int (*find)(const char *, void **, int, unsigned long long, int *) = dlsym(handle, "cuGetProcAddress_v2");
            OK(find("cuMemAlloc", (void **)&alloc, 12000, 0, NULL));
            OK(find("cuMemFree", (void **)&release, 12000, 0, NULL));
        }
    }
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    for (int i = 0; i < 12; i++) {
        CUdeviceptr p = 0;
        int result = alloc(&p, i == 11 ? 2048 * MIB : (size_t)(i + 1) * 4096);
        printf("alloc %d", result);
        if (result == 0) printf(" free %d", release(p));
        printf("\n");
    }
    return 0;
}

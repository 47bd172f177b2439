/* Programs look for GPUs like this: load the driver, ask, unload it; and load it again where they need it, then to another
 * place. Pointers that were handed out for the first one must not lead there any more. With an argument the first
 * one is used, too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/mman.h>

typedef unsigned long long address;

int main(int n, char **unused)
{
    int (*before)(address *, size_t) = 0;
    for (int round = 0; round < 2; round++) {
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!driver)
            return 2;
        int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
        int (*alloc)(address *, size_t) = (int (*)(address *, size_t))dlsym(driver, "cuMemAlloc_v2");
        int (*give_back)(address) = (int (*)(address))dlsym(driver, "cuMemFree_v2");
        int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
        int (*choose)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
        if (!init || !alloc || !give_back || !retain || !choose || init(0))
            return 3;
        address at;
        void *context;
        if ((round || n > 1) && (retain(&context, 0) || choose(context)))
            return 6;
        if (round || n > 1)
            for (int i = 0; i < 10; i++)
                if (alloc(&at, 1 << 20) || give_back(at))
                    return 4;
        if (round && before == alloc && (before(&at, 4096) || give_back(at)))
            return 5;
        before = alloc;
        if (round == 0) {
            dlclose(driver);
            printf("%s\n", dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD) ? "still there" : "gone");
            /* Something else takes its place. */
            mmap(0, 1 << 16, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            mmap(0, 64 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        }
    }
    puts("used twice");
    return 0 * !unused;
}

/* Looks for a driver as frameworks do: loads it, asks it, lets it go, and loads it again, where it may stand at another address. In between
 * threads work with it while others load and unload it around them. `loads TURNS` */
#define BY_DLOPEN
#include "torture.h"

static void *driver;
static void load(void)
{
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) die("libcuda.so.1");
    *(void **)&cuInit = dlsym(driver, "cuInit");
    *(void **)&cuDevicePrimaryCtxRetain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&cuCtxSetCurrent = dlsym(driver, "cuCtxSetCurrent");
    *(void **)&cuMemAlloc_v2 = dlsym(driver, "cuMemAlloc_v2");
    *(void **)&cuMemFree_v2 = dlsym(driver, "cuMemFree_v2");
}
static void *loads_too(void *unused)
{
    while (!stop) {
        void *again = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        (void)dlsym(again, "cuMemAlloc_v2");
        dlclose(again);
    }
    return unused;
}

int main(int argc, char **argv)
{
    int turns = argc > 1 ? atoi(argv[1]) : 10;
    long failed = 0;
    open_page();
    load();
    cuInit(0);
    dlclose(driver);
    for (int i = 0; i < turns; i++) {
        /* So that it comes elsewhere. */
        void *taken = mmap(NULL, (size_t)(1 + i % 5) << 14, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        load();
        failed += cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context);
        stop = 0;
        void *threads[] = {start(work_on, (void *)50L), start(work_on, (void *)50L), start(loads_too, NULL)};
        failed += work(50);
        stop = 1;
        for (int k = 0; k < 3; k++) join(threads[k]);
        dlclose(driver);
        CHECK(!dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD));
        if (i % 2) munmap(taken, (size_t)(1 + i % 5) << 14);
    }
    printf("%d turns, %ld failed\n", turns, failed);
    return 0;
}

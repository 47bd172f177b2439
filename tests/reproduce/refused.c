/* refused MODE: asks the driver for memory until it refuses, on a device of 1 GiB. */
#include "../programs/api.h"

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "linear";
    void *context, *stream = NULL;
    CUdeviceptr at[64];
    size_t left, total;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        return 3;
    /* What is given back before does not matter. */
    for (int i = 0; i < 64; i++)
        if (cuMemAlloc_v2(&at[i], 4 * MIB))
            return 3;
    for (int i = 0; i < 64; i++)
        if (i % 8 && cuMemFree_v2(at[i]))
            return 3;
    if (strcmp(mode, "unseen") && cuMemGetInfo_v2(&left, &total))
        return 3;
    if (!strcmp(mode, "ordered")) {
        if (cuMemAllocAsync(&at[0], 300 * MIB, stream))
            return 3;
        return cuMemAllocAsync(&at[1], 800 * MIB, stream) == 2 ? 0 : 3;
    }
    if (!strcmp(mode, "physical")) {
        CUmemAllocationProp what = {.type = 1, .location = {.type = 1}};
        CUhandle handle;
        if (cuMemCreate(&handle, 300 * MIB, &what, 0))
            return 3;
        return cuMemCreate(&handle, 800 * MIB, &what, 0) == 2 ? 0 : 3;
    }
    if (!strcmp(mode, "managed") && cuMemAllocManaged(&at[0], 100 * MIB, 1))
        return 3;
    if (!strcmp(mode, "host")) {
        void *host;
        return cuMemHostAlloc(&host, (size_t)1 << 60, 0) == 2 ? 0 : 3;
    }
    if (cuMemAlloc_v2(&at[1], 300 * MIB))
        return 3;
    return cuMemAlloc_v2(&at[2], 800 * MIB) == 2 ? 0 : 3;
}

//! Every allocation family of the driver API, through ordinary linking to libcuda.so.1.
//# Link: cuda
//# Expect: cuMemAlloc_v2 1 failed:201
//# Expect: cuMemAlloc_v2 123456 freed
//# Expect: cuMemAllocPitch_v2 10240 freed
//# Expect: cuMemAllocManaged 65536 freed
//# Expect: cuMemHostAlloc 4096 freed
//# Expect: cuMemAllocHost_v2 8192 freed
//# Expect: cuMemHostRegister_v2 8192 freed
//# Expect: cuMemHostRegister_v2 8192 failed:712
//# Expect: cuMemAllocAsync 100000 freed
//# Expect: cuMemAllocAsync_ptsz 200000 freed
//# Expect: cuMemAllocFromPoolAsync 300000 freed
//# Expect: cuArrayCreate_v2 1024 freed
//# Expect: cuArray3DCreate_v2 2048 freed
//# Expect: cuMipmappedArrayCreate 2304 freed
//# Expect: cuMemCreate 4194304 freed x2
#include "api.h"

static void vmm(void)
{
    CUmemAllocationProp prop = {.type = 1, .handle_types = 1, .location = {1, 0}};
    CUmemAccessDesc access = {{1, 0}, 3};
    CUhandle handle, second, again;
    CUdeviceptr base;
    size_t before, mapped, after;
    int fd;
    OK(cuMemGetInfo_v2(&before, NULL));
    OK(cuMemAddressReserve(&base, 64 * MIB, 0, 0, 0));
    OK(cuMemCreate(&handle, 4 * MIB, &prop, 0));
    OK(cuMemCreate(&second, 4 * MIB, &prop, 0));
    OK(cuMemMap(base, 4 * MIB, 0, handle, 0));
    OK(cuMemMap(base + 4 * MIB, 4 * MIB, 0, second, 0));
    RETURNS(1, cuMemMap(base, 4 * MIB, 0, second, 0));
    OK(cuMemSetAccess(base, 8 * MIB, &access, 1));
    OK(cuMemRelease(handle)); /* the map keeps it */
    OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)base));
    CHECK(again == handle);
    OK(cuMemExportToShareableHandle(&fd, second, 1, 0));
    OK(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd, 1)); /* no new memory */
    OK(cuMemRelease(again));
    CUdeviceptr start;
    size_t length;
    OK(cuMemGetAddressRange_v2(&start, &length, base + 5 * MIB));
    CHECK(start == base + 4 * MIB && length == 4 * MIB); /* a map is a range of its own */
    RETURNS(500, cuMemGetAddressRange_v2(&start, &length, base + 8 * MIB));
    OK(cuMemGetInfo_v2(&mapped, NULL));
    CHECK(before - mapped == 8 * MIB);
    RETURNS(1, cuMemAddressFree(base, 64 * MIB)); /* still mapped */
    RETURNS(1, cuMemUnmap(base, 6 * MIB));        /* not at a border */
    OK(cuMemUnmap(base, 8 * MIB));
    OK(cuMemRelease(handle));
    OK(cuMemRelease(second));
    RETURNS(1, cuMemRelease(second));
    OK(cuMemAddressFree(base, 64 * MIB));
    OK(cuMemGetInfo_v2(&after, NULL));
    CHECK(before == after);
}

int main(void)
{
    void *context, *host, *array, *pool, *stream;
    CUdeviceptr p, base;
    size_t pitch, bytes;
    OK(cuInit(0));
    RETURNS(201, cuMemAlloc_v2(&p, 1)); /* no context yet */
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));

    OK(cuMemAlloc_v2(&p, 123456));
    OK(cuMemGetAddressRange_v2(&base, &bytes, p + 1000));
    CHECK(base == p && bytes == 123456);
    OK(cuMemFree_v2(p));
    OK(cuMemAllocPitch_v2(&p, &pitch, 1000, 10, 4));
    OK(cuMemFree_v2(p));
    OK(cuMemAllocManaged(&p, 65536, 1));
    OK(cuMemFree_v2(p));
    OK(cuMemHostAlloc(&host, 4096, 0));
    OK(cuMemFreeHost(host));
    OK(cuMemAllocHost_v2(&host, 8192));
    OK(cuMemFreeHost(host));
    host = malloc(8192);
    OK(cuMemHostRegister_v2(host, 8192, 0));
    RETURNS(712, cuMemHostRegister_v2(host, 8192, 0));
    OK(cuMemHostUnregister(host));
    RETURNS(713, cuMemHostUnregister(host));
    free(host);

    OK(cuStreamCreate(&stream, 0));
    OK(cuMemAllocAsync(&p, 100000, stream));
    OK(cuMemFreeAsync(p, stream));
    OK(cuMemAllocAsync_ptsz(&p, 200000, NULL));
    OK(cuMemFreeAsync_ptsz(p, NULL));
    CUmemPoolProps props = {.type = 1, .location = {1, 0}};
    OK(cuMemPoolCreate(&pool, &props));
    OK(cuMemAllocFromPoolAsync(&p, 300000, pool, stream));
    OK(cuMemFree_v2(p)); /* the synchronous free takes them too */
    OK(cuMemPoolDestroy(pool));
    OK(cuStreamDestroy_v2(stream));

    CUarrayDescriptor flat = {64, 4, 0x20, 1};
    CUarray3dDescriptor cube = {8, 8, 8, 0x20, 1, 0};
    OK(cuArrayCreate_v2(&array, &flat));
    OK(cuArrayDestroy(array));
    OK(cuArray3DCreate_v2(&array, &cube));
    OK(cuArrayDestroy(array));
    OK(cuMipmappedArrayCreate(&array, &cube, 2));
    OK(cuMipmappedArrayDestroy(array));
    vmm();
    OK(cuDevicePrimaryCtxRelease_v2(0));
    return 0;
}

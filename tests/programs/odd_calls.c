//! Calls that a careless program makes: double free, NULL, size 0, sizes no device has, foreign pointers.
//# Link: cuda
//# Expect: cuMemAlloc_v2 4096 freed
//# Expect: cuMemAlloc_v2 0 failed:1
//# Expect: cuMemAlloc_v2 4096 failed:1
//# Expect: cuMemAlloc_v2 9223372036854775808 failed:2
//# Expect: cuMemAlloc_v2 18446744073709551615 failed:2
//# Expect: cuMemAlloc_v2 1 failed:3
//# Expect: cuMemHostAlloc 4096 freed
#include "api.h"

int main(void)
{
    void *context, *host;
    CUdeviceptr p, other;
    RETURNS(3, cuMemAlloc_v2(&p, 1)); /* not initialised */
    OK(cuInit(0));
    RETURNS(101, cuDevicePrimaryCtxRetain(&context, 99));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc_v2(&p, 4096));
    RETURNS(1, cuMemFree_v2(p + 512)); /* not its start */
    OK(cuMemFree_v2(p));
    RETURNS(1, cuMemFree_v2(p)); /* double free */
    OK(cuMemFree_v2(0));
    RETURNS(1, cuMemFree_v2(0x1234));
    RETURNS(1, cuMemAlloc_v2(&p, 0));
    RETURNS(1, cuMemAlloc_v2(NULL, 4096));
    RETURNS(2, cuMemAlloc_v2(&p, (size_t)1 << 63));
    RETURNS(2, cuMemAlloc_v2(&p, SIZE_MAX));
    OK(cuMemHostAlloc(&host, 4096, 0));
    RETURNS(1, cuMemFree_v2((CUdeviceptr)(uintptr_t)host)); /* the wrong kind of free */
    OK(cuMemFreeHost(host));
    RETURNS(1, cuMemFreeHost(host));
    OK(cuMemGetInfo_v2(NULL, NULL));
    RETURNS(500, cuMemGetAddressRange_v2(&other, NULL, 0x1234));
    return 0;
}

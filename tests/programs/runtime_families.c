//! Every allocation family of the runtime API, each freed once; one block is left over.
//# Link: cudart
//# Expect: cudaMalloc 123456 freed
//# Expect: cudaMalloc 7340032 leaked
//# Expect: cudaMallocPitch 10240 freed
//# Expect: cudaMalloc3D 4096 freed
//# Expect: cudaMallocArray 1024 freed
//# Expect: cudaMalloc3DArray 2048 freed
//# Expect: cudaMallocMipmappedArray 2304 freed
//# Expect: cudaMallocHost 4096 freed
//# Expect: cudaHostAlloc 8192 freed
//# Expect: cudaHostRegister 8192 freed
//# Expect: cudaMallocManaged 65536 freed
//# Expect: cudaMallocAsync 100000 freed
//# Expect: cudaMallocAsync_ptsz 200000 freed
//# Expect: cudaMallocFromPoolAsync 300000 freed
#include "api.h"

int main(void)
{
    void *p, *kept, *array, *pool, *stream, *event, *other;
    size_t pitch, free_bytes, total, before;
    cudaPitchedPtr pitched;
    cudaChannelFormatDesc format = {32, 0, 0, 0, 2};
    OK(cudaFree(0));
    OK(cudaMemGetInfo(&before, &total));

    OK(cudaMalloc(&p, 123456));
    OK(cudaMemset(p, 0, 123456));
    OK(cudaFree(p));
    OK(cudaMalloc(&kept, 7 * MIB));
    OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(before - free_bytes == 8 * MIB); /* whole units of 2 MiB */
    OK(cudaMallocPitch(&p, &pitch, 1000, 10));
    CHECK(pitch == 1024);
    OK(cudaFree(p));
    OK(cudaMalloc3D(&pitched, (cudaExtent){64, 4, 2}));
    OK(cudaFree(pitched.ptr));

    OK(cudaMallocArray(&array, &format, 64, 4, 0));
    OK(cudaFreeArray(array));
    OK(cudaMalloc3DArray(&array, &format, (cudaExtent){8, 8, 8}, 0));
    OK(cudaFreeArray(array));
    OK(cudaMallocMipmappedArray(&array, &format, (cudaExtent){8, 8, 8}, 2, 0));
    OK(cudaFreeMipmappedArray(array));

    OK(cudaMallocHost(&p, 4096));
    memset(p, 1, 4096);
    OK(cudaFreeHost(p));
    OK(cudaHostAlloc(&p, 8192, 2));
    OK(cudaFreeHost(p));
    p = malloc(8192);
    OK(cudaHostRegister(p, 8192, 0));
    OK(cudaHostUnregister(p));
    free(p);
    OK(cudaMallocManaged(&p, 65536, 1));
    memset(p, 1, 65536);
    OK(cudaFree(p));

    OK(cudaStreamCreate(&stream));
    OK(cudaMallocAsync(&p, 100000, stream));
    OK(cudaFreeAsync(p, stream));
    OK(cudaMallocAsync_ptsz(&p, 200000, 0));
    OK(cudaFreeAsync_ptsz(p, 0));
    cudaMemPoolProps props = {.alloc_type = 1, .location = {1, 0}};
    OK(cudaMemPoolCreate(&pool, &props));
    OK(cudaMallocFromPoolAsync(&p, 300000, pool, stream));
    uint64_t reserved = 0, used = 0;
    OK(cudaMemPoolGetAttribute(pool, 5, &reserved));
    OK(cudaMemPoolGetAttribute(pool, 7, &used));
    CHECK(reserved == 32 * MIB && used >= 300000 && used < 301000);
    OK(cudaFreeAsync(p, stream));
    OK(cudaMemPoolTrimTo(pool, 0));
    OK(cudaMemPoolDestroy(pool));

    float milliseconds;
    OK(cudaEventCreate(&event));
    OK(cudaEventCreate(&other));
    OK(cudaEventRecord(event, stream));
    OK(cudaEventRecord(other, stream));
    OK(cudaStreamWaitEvent(stream, event, 0));
    OK(cudaEventSynchronize(other));
    OK(cudaEventQuery(event));
    OK(cudaEventElapsedTime(&milliseconds, event, other));
    OK(cudaEventDestroy(event));
    OK(cudaEventDestroy(other));
    OK(cudaStreamQuery(stream));
    OK(cudaStreamSynchronize(stream));
    OK(cudaStreamDestroy(stream));
    OK(cudaDeviceSynchronize());
    OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(before - free_bytes == 8 * MIB); /* the pools gave theirs back */
    return 0;
}

//! What programs ask the runtime: devices, properties, pointers, memory; on two devices and from a second thread.
//# Link: cudart
//# Env: FAKE_CUDA_DEVICES=2
//# Env: FAKE_CUDA_MEMORY=4GiB
//# Env: FAKE_CUDA_CONTEXT=256MiB
//# Expect: cudaMalloc 1048576 freed
//# Expect: cudaMalloc 3145728 freed
//# Expect: cudaMalloc 4194304 freed
//# Expect: cudaMalloc 5242880 leaked
#include "api.h"

#include <pthread.h>

int cudaGetDeviceProperties(void *, int), cudaDeviceGetAttribute(int *, int, int), cudaPeekAtLastError(void);
int cudaDeviceCanAccessPeer(int *, int, int), cudaDeviceGetPCIBusId(char *, int, int);
typedef struct { int type, device; void *device_pointer, *host_pointer; long reserved[8]; } cudaPointerAttributes;
int cudaPointerGetAttributes(cudaPointerAttributes *, const void *);

static void *in_thread(void *unused)
{
    void *p;
    int device;
    OK(cudaGetDevice(&device)); /* a new thread starts with the first device */
    CHECK(device == 0);
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&p, 4 * MIB));
    OK(cudaFree(p));
    return unused;
}

int main(void)
{
    int count, value, peer;
    size_t free_bytes, total;
    void *p, *q;
    char properties[8192], bus[32];
    cudaPointerAttributes attributes;
    pthread_t thread;
    OK(cudaGetDeviceCount(&count));
    CHECK(count == 2);
    RETURNS(101, cudaSetDevice(2));
    RETURNS(101, cudaGetLastError());
    OK(cudaRuntimeGetVersion(&value));
    CHECK(value >= 11080);
    OK(cudaDriverGetVersion(&value));
    CHECK(value == 13050);
    OK(cudaGetDeviceProperties(properties, 1));
    CHECK(strcmp(properties, "Fake GPU") == 0); /* the name comes first */
    OK(cudaDeviceGetAttribute(&value, 16, 0));
    CHECK(value == 132);
    OK(cudaDeviceCanAccessPeer(&peer, 0, 1));
    OK(cudaDeviceGetPCIBusId(bus, sizeof bus, 1));
    CHECK(peer == 1 && strcmp(bus, "0000:02:00.0") == 0);

    OK(cudaMalloc(&p, MIB));
    OK(cudaPointerGetAttributes(&attributes, (char *)p + 5));
    CHECK(attributes.type == 2 && attributes.device == 0 && attributes.device_pointer == (char *)p + 5);
    OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(total == 4 * GIB && total - free_bytes == 258 * MIB); /* the context and one block */
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&q, 3 * MIB));
    OK(cudaPointerGetAttributes(&attributes, q));
    CHECK(attributes.type == 2 && attributes.device == 1);
    OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(total - free_bytes == 260 * MIB);
    OK(cudaPointerGetAttributes(&attributes, &count));
    CHECK(attributes.type == 0); /* ordinary memory */
    OK(cudaFree(p)); /* of the other device */
    OK(cudaFree(q));
    CHECK(pthread_create(&thread, NULL, in_thread, NULL) == 0 && pthread_join(thread, NULL) == 0);
    OK(cudaMalloc(&p, 5 * MIB));
    OK(cudaDeviceReset()); /* takes the block with it */
    RETURNS(1, cudaFree(p));
    OK(cudaMemGetInfo(&free_bytes, &total));
    CHECK(total - free_bytes == 256 * MIB);
    return 0;
}

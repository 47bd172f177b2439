/* The parts of NVIDIA's interfaces that the test programs use, so that they compile without NVIDIA's headers.
 * Prototypes as in cuda_runtime_api.h and cuda.h of 11.8 to 13.5 (where these agree). */
#ifndef API_H
#define API_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUhandle;
typedef struct { int type, id; } CUmemLocation;
typedef struct { int type, handle_types; CUmemLocation location; void *win32; unsigned char flags[8]; } CUmemAllocationProp;
typedef struct { int type, handle_types; CUmemLocation location; void *win32; size_t max_size; char reserved[56]; } CUmemPoolProps;
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;
typedef struct { CUmemPoolProps pool; const CUmemAccessDesc *access; size_t count, bytesize; CUdeviceptr dptr; } CUmemAllocNodeParams;
typedef struct { int type, reserved[3]; union { CUmemAllocNodeParams alloc; CUdeviceptr freed; char all[232]; }; long long end; } CUgraphNodeParams;
typedef struct { size_t width, height; int format; unsigned channels; } CUarrayDescriptor;
typedef struct { size_t width, height, depth; int format; unsigned channels, flags; } CUarray3dDescriptor;
typedef struct { char bytes[64]; } CUipcMemHandle;

int cuInit(unsigned), cuDriverGetVersion(int *), cuDeviceGet(int *, int), cuDeviceGetCount(int *);
int cuDevicePrimaryCtxReset_v2(int), cuDevicePrimaryCtxRetain(void **, int), cuDevicePrimaryCtxRelease_v2(int), cuCtxSetCurrent(void *);
int cuCtxCreate_v2(void **, unsigned, int), cuCtxDestroy_v2(void *), cuCtxSynchronize(void);
int cuMemGetInfo_v2(size_t *, size_t *), cuMemGetAddressRange_v2(CUdeviceptr *, size_t *, CUdeviceptr);
int cuMemAlloc_v2(CUdeviceptr *, size_t), cuMemFree_v2(CUdeviceptr);
int cuMemAllocPitch_v2(CUdeviceptr *, size_t *, size_t, size_t, unsigned), cuMemAllocManaged(CUdeviceptr *, size_t, unsigned);
int cuMemHostAlloc(void **, size_t, unsigned), cuMemAllocHost_v2(void **, size_t), cuMemFreeHost(void *);
int cuMemHostRegister_v2(void *, size_t, unsigned), cuMemHostUnregister(void *);
int cuMemAllocAsync(CUdeviceptr *, size_t, void *), cuMemAllocAsync_ptsz(CUdeviceptr *, size_t, void *);
int cuMemFreeAsync(CUdeviceptr, void *), cuMemFreeAsync_ptsz(CUdeviceptr, void *);
int cuMemAllocFromPoolAsync(CUdeviceptr *, size_t, void *, void *);
int cuMemPoolCreate(void **, const CUmemPoolProps *), cuMemPoolDestroy(void *), cuMemPoolTrimTo(void *, size_t);
int cuMemPoolGetAttribute(void *, int, void *), cuMemPoolSetAttribute(void *, int, void *), cuDeviceGetDefaultMemPool(void **, int);
int cuMemCreate(CUhandle *, size_t, const CUmemAllocationProp *, unsigned long long), cuMemRelease(CUhandle);
int cuMemRetainAllocationHandle(CUhandle *, void *), cuMemMap(CUdeviceptr, size_t, size_t, CUhandle, unsigned long long);
int cuMemUnmap(CUdeviceptr, size_t), cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
int cuMemAddressFree(CUdeviceptr, size_t), cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
int cuMemExportToShareableHandle(void *, CUhandle, int, unsigned long long);
int cuMemImportFromShareableHandle(CUhandle *, void *, int);
int cuIpcGetMemHandle(CUipcMemHandle *, CUdeviceptr), cuIpcOpenMemHandle_v2(CUdeviceptr *, CUipcMemHandle, unsigned);
int cuIpcCloseMemHandle(CUdeviceptr), cuArrayCreate_v2(void **, const CUarrayDescriptor *), cuArrayDestroy(void *);
int cuArray3DCreate_v2(void **, const CUarray3dDescriptor *), cuMipmappedArrayCreate(void **, const CUarray3dDescriptor *, unsigned);
int cuMipmappedArrayDestroy(void *), cuStreamCreate(void **, unsigned), cuStreamDestroy_v2(void *), cuStreamSynchronize(void *);
int cuStreamBeginCapture_v2(void *, int), cuStreamEndCapture(void *, void **);
int cuGraphCreate(void **, unsigned), cuGraphDestroy(void *), cuGraphInstantiateWithFlags(void **, void *, unsigned long long);
int cuGraphAddMemAllocNode(void **, void *, void *const *, size_t, CUmemAllocNodeParams *);
int cuGraphAddMemFreeNode(void **, void *, void *const *, size_t, CUdeviceptr);
int cuGraphAddNode(void **, void *, void *const *, size_t, CUgraphNodeParams *);
int cuGraphAddNode_v2(void **, void *, void *const *, const void *, size_t, CUgraphNodeParams *);
int cuGraphAddNode_v3(void **, void *, void *const *, const void *, size_t, CUgraphNodeParams *);
int cuGraphLaunch(void *, void *), cuGraphExecDestroy(void *);
int cuGetProcAddress(const char *, void **, int, unsigned long long);
int cuGetProcAddress_v2(const char *, void **, int, unsigned long long, int *);

typedef struct { size_t width, height, depth; } cudaExtent;
typedef struct { void *ptr; size_t pitch, xsize, ysize; } cudaPitchedPtr;
typedef struct { int x, y, z, w, kind; } cudaChannelFormatDesc;
typedef struct { int alloc_type, handle_types; CUmemLocation location; void *win32; size_t max_size; char reserved[56]; } cudaMemPoolProps;

int cudaMalloc(void **, size_t), cudaFree(void *), cudaMallocPitch(void **, size_t *, size_t, size_t);
int cudaMalloc3D(cudaPitchedPtr *, cudaExtent), cudaMallocManaged(void **, size_t, unsigned);
int cudaMallocHost(void **, size_t), cudaHostAlloc(void **, size_t, unsigned), cudaFreeHost(void *);
int cudaHostRegister(void *, size_t, unsigned), cudaHostUnregister(void *);
int cudaMallocAsync(void **, size_t, void *), cudaFreeAsync(void *, void *);
int cudaMallocAsync_ptsz(void **, size_t, void *), cudaFreeAsync_ptsz(void *, void *);
int cudaMallocFromPoolAsync(void **, size_t, void *, void *), cudaMemPoolCreate(void **, const cudaMemPoolProps *);
int cudaMemPoolDestroy(void *), cudaMemPoolTrimTo(void *, size_t), cudaDeviceGetDefaultMemPool(void **, int);
int cudaMemPoolGetAttribute(void *, int, void *);
int cudaMallocArray(void **, const cudaChannelFormatDesc *, size_t, size_t, unsigned), cudaFreeArray(void *);
int cudaMalloc3DArray(void **, const cudaChannelFormatDesc *, cudaExtent, unsigned);
int cudaMallocMipmappedArray(void **, const cudaChannelFormatDesc *, cudaExtent, unsigned, unsigned);
int cudaFreeMipmappedArray(void *), cudaGetDeviceCount(int *), cudaSetDevice(int), cudaGetDevice(int *);
int cudaDeviceSynchronize(void), cudaDeviceReset(void), cudaMemGetInfo(size_t *, size_t *), cudaGetLastError(void);
int cudaStreamCreate(void **), cudaStreamDestroy(void *), cudaStreamSynchronize(void *), cudaStreamQuery(void *);
int cudaEventCreate(void **), cudaEventRecord(void *, void *), cudaEventSynchronize(void *), cudaEventQuery(void *);
int cudaEventElapsedTime(float *, void *, void *), cudaEventDestroy(void *), cudaStreamWaitEvent(void *, void *, unsigned);
int cudaRuntimeGetVersion(int *), cudaDriverGetVersion(int *), cudaIpcGetMemHandle(CUipcMemHandle *, void *);
int cudaMemset(void *, int, size_t), cudaMemcpy(void *, const void *, size_t, int);
const char *cudaGetErrorName(int);

/* A program ends with 1 when a call does not return what it should. */
#define RETURNS(code, call)                                                                                  \
    do {                                                                                                     \
        int got_ = (call);                                                                                   \
        if (got_ == (code)) break;                                                                           \
        fprintf(stderr, "%s:%d: %s returned %d, not %d\n", __FILE__, __LINE__, #call, got_, (code));         \
        exit(1);                                                                                             \
    } while (0)
#define OK(call) RETURNS(0, call)
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (condition) break;                                                                                \
        fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition);                        \
        exit(1);                                                                                             \
    } while (0)

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

#endif

/* The CUDA runtime functions that libc10_cuda.so imports, on top of stub_driver.c. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { SUCCESS = 0, NOT_READY = 600, NOT_SUPPORTED = 801 };

uint64_t stub_total(void);
uint64_t stub_used(void);
int stub_malloc(void **, size_t);
int stub_free(void *);
int stub_is_done(void *);
void stub_record(void *, void *);

int cudaMalloc(void **out, size_t bytes) { return stub_malloc(out, bytes); }
int cudaFree(void *pointer) { return pointer ? stub_free(pointer) : SUCCESS; }
int cudaMemGetInfo(size_t *available, size_t *total) {
    *total = stub_total();
    *available = stub_total() - stub_used();
    return SUCCESS;
}
int cudaGetDeviceCount(int *out) { *out = 1; return SUCCESS; }
int cudaGetDevice(int *out) { *out = 0; return SUCCESS; }
int cudaSetDevice(int device) { return SUCCESS; }
/* totalGlobalMem lies behind name[256], uuid, luid and their mask in cudaDeviceProp of CUDA 11 to 13. */
static int properties(char *out) {
    const uint64_t total = stub_total();
    memset(out, 0, 288);
    strcpy(out, "stub");
    memcpy(out + 288, &total, sizeof total);
    return SUCCESS;
}
int cudaGetDeviceProperties(void *out, int device) { return properties(out); }
int cudaGetDeviceProperties_v2(void *out, int device) { return properties(out); }
int cudaDriverGetVersion(int *out) { *out = 13000; return SUCCESS; }
int cudaDeviceCanAccessPeer(int *out, int device, int peer) { *out = 0; return SUCCESS; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
const char *cudaGetErrorString(int error) { return "stub error"; }
const char *cudaGetErrorName(int error) { return "stubError"; }

int cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    static uintptr_t next = 0x1000;
    *out = (void *)(next += 0x100);
    return SUCCESS;
}
int cudaEventCreateWithFlags(void **out, unsigned flags) {
    static uintptr_t next = 1;
    *out = (void *)next++;
    return SUCCESS;
}
int cudaEventRecord(void *event, void *stream) {
    stub_record(event, stream);
    return SUCCESS;
}
int cudaEventQuery(void *event) { return stub_is_done(event) ? SUCCESS : NOT_READY; }
int cudaStreamIsCapturing(void *stream, int *out) { *out = 0; return SUCCESS; }
int cudaStreamGetCaptureInfo(void *stream, int *out) { *out = 0; return SUCCESS; }
int cudaStreamGetCaptureInfo_v2(void *stream, int *out) { *out = 0; return SUCCESS; }

static int entry(const char *symbol, void **out, int *status) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *out = driver ? dlsym(driver, symbol) : NULL;
    if (status) *status = *out ? 0 : 1;
    return SUCCESS;
}
int cudaGetDriverEntryPoint(const char *symbol, void **out, uint64_t flags, int *status) { return entry(symbol, out, status); }
int cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned version, uint64_t flags, int *status) {
    return entry(symbol, out, status);
}

#define NOTHING(name) int name(void) { return SUCCESS; }
NOTHING(cudaDeviceEnablePeerAccess) NOTHING(cudaDeviceSynchronize) NOTHING(cudaEventDestroy) NOTHING(cudaEventElapsedTime)
NOTHING(cudaEventSynchronize) NOTHING(cudaGetLastError) NOTHING(cudaMemcpy) NOTHING(cudaMemcpyAsync)
NOTHING(cudaMemcpyPeerAsync) NOTHING(cudaStreamQuery) NOTHING(cudaStreamSynchronize) NOTHING(cudaStreamWaitEvent)
NOTHING(cudaThreadExchangeStreamCaptureMode)
#define ABSENT(name) int name(void) { return NOT_SUPPORTED; }
ABSENT(cudaDeviceGetDefaultMemPool) ABSENT(cudaDeviceGetGraphMemAttribute) ABSENT(cudaDeviceSetGraphMemAttribute)
ABSENT(cudaFreeAsync) ABSENT(cudaGraphNodeGetDependencies) ABSENT(cudaIpcCloseMemHandle) ABSENT(cudaIpcGetMemHandle)
ABSENT(cudaIpcOpenMemHandle) ABSENT(cudaMallocAsync) ABSENT(cudaMemPoolGetAttribute) ABSENT(cudaMemPoolSetAccess)
ABSENT(cudaMemPoolSetAttribute) ABSENT(cudaMemPoolTrimTo)

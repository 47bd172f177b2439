/* The driver of the torture: without a lock, a file or a system call, so that whatever a program does to itself, the driver is not what
 * breaks. The address of memory is made of its size, and a call takes as long as the least of a real driver's. */
#include <stddef.h>
#include <stdio.h>

typedef unsigned long long address;
#define MARK 0x4000000000000000ULL

static void some_work(void)
{
    for (volatile int i = 0; i < 300; i++) {}
}
int cuInit(unsigned flags) { return flags ? 1 : 0; }
int cuDriverGetVersion(int *version) { return *version = 12080, 0; }
int cuDevicePrimaryCtxRetain(void **context, int device)
{
    static int the_context;
    return *context = &the_context, device ? 101 : 0;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return device ? 101 : 0; }
int cuCtxSetCurrent(void *context) { return context ? 0 : 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }
int cuDeviceGetCount(int *count) { return *count = 1, 0; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int length, int device) { return snprintf(name, (size_t)length, "torture"), device ? 101 : 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 1UL << 40, device ? 101 : 0; }
/* From here on there is no memory, or there is again. */
static volatile int is_out_of_memory;
void torture_refuses(int yes) { is_out_of_memory = yes; }
int cuMemAlloc_v2(address *out, size_t bytes)
{
    some_work();
    if (!bytes) return 1;
    if (is_out_of_memory) return 2;
    *out = MARK | bytes;
    return 0;
}
int cuMemFree_v2(address p)
{
    some_work();
    return p & MARK ? 0 : 1;
}

/* Streams are captured into graphs that do nothing. */
int cuStreamBeginCapture_v2(void *stream, int mode) { return stream && mode >= 0 ? 0 : 1; }
int cuStreamIsCapturing(void *stream, int *status) { return *status = stream != NULL, 0; }
int cuStreamEndCapture(void *stream, void **graph)
{
    static int the_graph;
    return *graph = &the_graph, stream ? 0 : 1;
}
int cuGraphInstantiateWithFlags(void **made, void *graph, unsigned long long flags) { return *made = graph, flags ? 1 : 0; }
int cuGraphLaunch(void *graph, void *stream) { return graph && stream ? 0 : 1; }
int cuGraphExecDestroy(void *graph) { return graph ? 0 : 1; }
int cuGraphDestroy(void *graph) { return graph ? 0 : 1; }

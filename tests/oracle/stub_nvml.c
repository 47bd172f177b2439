/* NVML of a device on which no process runs. PyTorch asks it for the out-of-memory text. */
#include <stddef.h>

int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out) { *out = (void *)1; return 0; }
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *out) { *count = 0; return 0; }
int nvmlDeviceGetGpuFabricInfo(void *device, void *out) { return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *device, void *out) { return 0; }

#define ABSENT(name) int name(void) { return 3; }
ABSENT(nvmlDeviceGetCapabilities) ABSENT(nvmlDeviceGetNvLinkRemoteDeviceType) ABSENT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
ABSENT(nvmlSystemGetCudaDriverVersion_v2)

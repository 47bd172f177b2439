//! NVML in one process, CUDA in another: what the observer sees, also after a kill -9.
//# Link: none
//# Env: FAKE_CUDA_MEMORY=4GiB
//# Env: FAKE_CUDA_DEVICES=2
//# Expect: cuMemAlloc_v2 104857600 leaked
//# Expect: cuMemAlloc_v2 4294967296 failed:2
#define _GNU_SOURCE
#include "api.h"

#include <dlfcn.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static void *library;
#define CALL(name, ...) ((int (*)())dlsym(library, name))(__VA_ARGS__)

static void allocate(int ready)
{
    void *context;
    CUdeviceptr p;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library);
    OK(CALL("cuInit", 0));
    OK(CALL("cuDevicePrimaryCtxRetain", &context, 1));
    OK(CALL("cuCtxSetCurrent", context));
    OK(CALL("cuMemAlloc_v2", &p, 100 * MIB));
    RETURNS(2, CALL("cuMemAlloc_v2", &p, 4 * GIB));
    CHECK(write(ready, "x", 1) == 1);
    for (;;) pause();
}

int main(void)
{
    int pipe_ends[2];
    char state[] = "/tmp/fake-cuda-state.XXXXXX", byte;
    CHECK(mkstemp(state) >= 0 && pipe(pipe_ends) == 0);
    setenv("FAKE_CUDA_STATE", state, 1);
    pid_t child = fork();
    if (child == 0) allocate(pipe_ends[1]);
    CHECK(read(pipe_ends[0], &byte, 1) == 1);

    unsigned count;
    char uuid[96], name[96];
    void *device;
    struct { unsigned long long total, free, used; } memory;
    struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } processes[4];
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    CHECK(library);
    RETURNS(1, CALL("nvmlDeviceGetCount_v2", &count));
    OK(CALL("nvmlInit_v2"));
    OK(CALL("nvmlDeviceGetCount_v2", &count));
    CHECK(count == 2);
    OK(CALL("nvmlDeviceGetHandleByIndex_v2", 1, &device));
    OK(CALL("nvmlDeviceGetName", device, name, sizeof name));
    OK(CALL("nvmlDeviceGetUUID", device, uuid, sizeof uuid));
    CHECK(strncmp(uuid, "GPU-", 4) == 0 && strlen(uuid) == 40);
    OK(CALL("nvmlDeviceGetMemoryInfo", device, &memory));
    CHECK(memory.total == 4 * GIB && memory.used == 100 * MIB && memory.free == memory.total - memory.used);
    count = 4;
    OK(CALL("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, processes));
    CHECK(count == 1 && processes[0].pid == (unsigned)child && processes[0].used == 100 * MIB);
    count = 0;
    RETURNS(7, CALL("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, NULL));
    CHECK(count == 1);

    kill(child, SIGKILL);
    CHECK(waitpid(child, NULL, 0) == child);
    OK(CALL("nvmlDeviceGetMemoryInfo", device, &memory));
    CHECK(memory.used == 0);
    OK(CALL("nvmlShutdown"));
    unlink(state);
    return 0;
}

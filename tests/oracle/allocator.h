// The beginning of a library that uses PyTorch's own allocator on the fake device.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <thread>

namespace allocator = c10::cuda::CUDACachingAllocator;

// Starts the allocator of one device. Of a library: a program would have a copy of `allocator` of its own.
static auto* started() {
    static auto yes = +[](int64_t) { return true; };
    if (auto f = (void (*)(int64_t))dlsym(RTLD_DEFAULT, "_ZN3c104cuda6detail21init_p2p_access_cacheEl")) f(1);
    for (const char* name : {"_ZN3c104cuda9_internal20setHasPrimaryContextEPFbaE", "_ZN3c104cuda9_internal20setHasPrimaryContextEPFblE"})
        if (auto f = (void (*)(void*))dlsym(RTLD_DEFAULT, name)) f((void*)yes);
    int n_devices;
    cudaGetDeviceCount(&n_devices);
    allocator::init(1);
    return allocator::allocator.load();
}

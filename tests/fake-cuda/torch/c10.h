// The few declarations of PyTorch that its memory hooks stand on, with the layouts and mangled names of torch 1.11 to 2.11:
// c10/core/{Device,Stream,Allocator}.h, c10/cuda/{CUDAStream,CUDACachingAllocator}.h.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#define API __attribute__((visibility("default")))

namespace c10 {

enum class DeviceType : int8_t { CPU = 0, CUDA = 1 };

struct Device { // 2 bytes, passed in a register
    DeviceType type;
    int8_t index;
};

struct Stream { // 16 bytes, returned in two registers
    Device device;
    int64_t id;
};

using DeleterFnPtr = void (*)(void *);

class DataPtr { // 32 bytes; has a destructor, so it is returned through memory
    void *data;
    std::unique_ptr<void, DeleterFnPtr> context;
    Device device;

public:
    DataPtr(void *data, DeleterFnPtr deleter, Device device) : data(data), context(data, deleter), device(device) {}
    void *get() const { return data; }
    void *release() { return context.release(); }
};

struct API Allocator {
    virtual ~Allocator();                      // vtable slots 0 and 1
    virtual DataPtr allocate(size_t bytes) = 0; // slot 2
    virtual DeleterFnPtr raw_deleter() const = 0;
};

API void reportMemoryUsageToProfiler(void *block, int64_t change, size_t total_allocated, size_t total_reserved,
                                     Device device);
API void reportOutOfMemoryToProfiler(int64_t wanted, size_t total_allocated, size_t total_reserved, Device device);

namespace cuda {
API Stream getCurrentCUDAStream(int8_t device = -1); // CUDAStream is a Stream and nothing more
namespace CUDACachingAllocator {
extern API std::atomic<Allocator *> allocator;
}
} // namespace cuda
} // namespace c10

static_assert(sizeof(c10::Device) == 2 && sizeof(c10::Stream) == 16 && sizeof(c10::DataPtr) == 32, "PyTorch's layouts");

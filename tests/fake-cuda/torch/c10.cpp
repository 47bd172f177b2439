// libc10.so: the two functions through which PyTorch's allocator tells its profiler about every block. Without a profiler they
// do nothing, and that is all that this stand-in can do.
#include "c10.h"

namespace c10 {
Allocator::~Allocator() = default;
void reportMemoryUsageToProfiler(void *, int64_t, size_t, size_t, Device) {}
void reportOutOfMemoryToProfiler(int64_t, size_t, size_t, Device) {}
} // namespace c10

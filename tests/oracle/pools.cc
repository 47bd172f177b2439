// Opens, uses, releases and empties private pools of PyTorch's own allocator, as graphs and MemPools do, and says where each
// block lies. See pools.sh.
#include "allocator.h"

extern "C" int run() {
    auto* caching = started();
    auto get = [&](size_t bytes) {
        auto pointer = caching->allocate(bytes);
        printf("%zu %p\n", bytes, pointer.get());
        return pointer;
    };
    auto self = std::this_thread::get_id();
    // Before there is a context: its first segment makes it.
    allocator::beginAllocateToPool(0, {0, 5}, [self](cudaStream_t) { return std::this_thread::get_id() == self; });
    auto early = get(6000);
    allocator::endAllocateToPool(0, {0, 5});
    {
        auto a = get(1000);
        allocator::beginAllocateToPool(0, {0, 7}, [self](cudaStream_t) { return std::this_thread::get_id() == self; });
        auto b = get(2000);
        allocator::endAllocateToPool(0, {0, 7});
        auto c = get(3000);
        allocator::beginAllocateToPool(0, {9, 0}, [self](cudaStream_t) { return std::this_thread::get_id() == self; });
        auto d = get(4 << 20);
#ifdef HAVE_OVERFLOW_FLAG
        allocator::setUseOnOOM(0, {9, 0}, false);
#elif defined(HAVE_OVERFLOW)
        allocator::setUseOnOOM(0, {9, 0});
#endif
#ifdef HAVE_NO_SPLIT
        allocator::setNoSplit(0, {9, 0});
#endif
        allocator::endAllocateToPool(0, {9, 0});
    }
    allocator::releasePool(0, {0, 7});
    allocator::releasePool(0, {0, 5});
    allocator::emptyCache();
    auto e = get(5000);
    allocator::releasePool(0, {9, 0});
    allocator::emptyCache();
    fflush(stdout);
    _Exit(0);  // The allocator's destructors expect more of CUDA.
}

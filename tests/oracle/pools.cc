// Opens, uses, releases and empties private pools of PyTorch's own allocator, as graphs and MemPools do, and says where each
// block lies. See pools.sh.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <thread>

namespace allocator = c10::cuda::CUDACachingAllocator;

// Of a library: a program would have a copy of `allocator` of its own.
extern "C" int run() {
    static auto yes = +[](int64_t) { return true; };
    if (auto f = (void (*)(int64_t))dlsym(RTLD_DEFAULT, "_ZN3c104cuda6detail21init_p2p_access_cacheEl")) f(1);
    for (const char* name : {"_ZN3c104cuda9_internal20setHasPrimaryContextEPFbaE", "_ZN3c104cuda9_internal20setHasPrimaryContextEPFblE"})
        if (auto f = (void (*)(void*))dlsym(RTLD_DEFAULT, name)) f((void*)yes);
    int n_devices;
    cudaGetDeviceCount(&n_devices);
    allocator::init(1);
    auto* caching = allocator::allocator.load();
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

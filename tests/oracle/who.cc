// Asks PyTorch's own allocator for many tensors, in the default pool and in two private ones, with trims between, while it keeps its own
// history; prints that history. Under `gputrace record` there is a trace of the same addresses. See who.sh.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <cstdio>
#include <cstdlib>
#include <dlfcn.h>
#include <thread>
#include <vector>

namespace allocator = c10::cuda::CUDACachingAllocator;

static unsigned long long seed = 1;
static unsigned below(unsigned bound) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(seed >> 33) % bound;
}

// Of a library: a program would have a copy of `allocator` of its own.
extern "C" int run() {
    static auto yes = +[](int64_t) { return true; };
    if (auto f = (void (*)(int64_t))dlsym(RTLD_DEFAULT, "_ZN3c104cuda6detail21init_p2p_access_cacheEl")) f(1);
    for (const char* name : {"_ZN3c104cuda9_internal20setHasPrimaryContextEPFbaE", "_ZN3c104cuda9_internal20setHasPrimaryContextEPFblE"})
        if (auto f = (void (*)(void*))dlsym(RTLD_DEFAULT, name)) f((void*)yes);
    int n_devices;
    cudaGetDeviceCount(&n_devices);
    allocator::init(1);
    allocator::recordHistory(true, nullptr, 100000, allocator::RecordContext::NEVER, false, {});
    auto* caching = allocator::allocator.load();
    auto self = std::this_thread::get_id();
    const size_t sizes[] = {600, 40000, 700 << 10, 3 << 20, 12 << 20, 45 << 20};
    std::vector<c10::DataPtr> live;
    for (int step = 0; step < 600; step++) {
        unsigned what = below(20), pool = below(3);
        if (what < 10) {
            if (pool) allocator::beginAllocateToPool(0, {0, pool}, [self](cudaStream_t) { return std::this_thread::get_id() == self; });
            live.push_back(caching->allocate(sizes[below(6)] + 512 * below(40)));
            if (pool) allocator::endAllocateToPool(0, {0, pool});
        } else if (what < 19 && !live.empty()) {
            std::swap(live[below(live.size())], live.back());
            live.pop_back();
        } else if (what == 19) {
            allocator::emptyCache();
        }
    }
    for (const auto& rows : allocator::snapshot().device_traces)
        for (const auto& row : rows)
            if (row.action_ <= 1) printf("%d %zu %zu\n", (int)row.action_, (size_t)row.addr_, (size_t)row.size_);
    fflush(stdout);
    _Exit(0);  // The allocator's destructors expect more of CUDA.
}

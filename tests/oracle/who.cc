// Asks PyTorch's own allocator for many tensors, in the default pool and in two private ones, with trims between, while it keeps its own
// history; prints that history. Under `gputrace record` there is a trace of the same addresses. See who.sh.
#include "allocator.h"
#include <vector>

static unsigned long long seed = 1;
static unsigned below(unsigned bound) {
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(seed >> 33) % bound;
}

extern "C" int run() {
    auto* caching = started();
    allocator::recordHistory(true, nullptr, 100000, allocator::RecordContext::NEVER, false, {});
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

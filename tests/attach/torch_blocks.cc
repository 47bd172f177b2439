// Works with PyTorch's own allocator as a training loop does, and says what the allocator counts. Built against the headers and the library
// of a release (living.py).
//
//   step N: N more requests or frees, then one of 512 bytes that is freed again; prints allocated, reserved and requested bytes
//   THREADS=N (default 1): as many threads, which work at the same time
//   TURNS=N: reads nothing, but does N each turn until a file `stop` appears, and writes what is asked for then, and the turn's milliseconds
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace allocator = c10::cuda::CUDACachingAllocator;

struct Worker {
    uint64_t state;
    std::vector<c10::DataPtr> held;
    explicit Worker(uint64_t seed) : state(seed) {}

    uint64_t next(uint64_t below) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (state >> 33) % below;
    }
    void step(int n) {
        for (; n > 0; n--) {
            if (held.size() < 20 || (held.size() < 120 && next(2))) {
                size_t bytes = next(4) ? next(1 << 20) + 1 : next(64 << 20) + 1;
                held.push_back(allocator::allocator.load()->allocate(bytes));
            } else {
                size_t which = next(held.size());
                std::swap(held[which], held.back());
                held.pop_back();
            }
        }
    }
};

// Of a library: a program would have a copy of `allocator` of its own.
extern "C" int run() {
    static auto yes = +[](int64_t) { return true; };
    if (auto f = (void (*)(int64_t))dlsym(RTLD_DEFAULT, "_ZN3c104cuda6detail21init_p2p_access_cacheEl")) f(1);
    for (const char* name : {"_ZN3c104cuda9_internal20setHasPrimaryContextEPFbaE", "_ZN3c104cuda9_internal20setHasPrimaryContextEPFblE"})
        if (auto f = (void (*)(void*))dlsym(RTLD_DEFAULT, name)) f((void*)yes);
    cudaFree(nullptr);  // Makes the context.
    allocator::init(1);
    const char* threads = getenv("THREADS");
    std::vector<Worker> workers;
    for (int i = 0; i < (threads ? atoi(threads) : 1); i++) workers.emplace_back(i + 1);
    char word[16];
    const char* turns = getenv("TURNS");
    int n = turns ? atoi(turns) : 0;
    for (unsigned turn = 1; turns ? access("stop", F_OK) : scanf("%15s %d", word, &n) == 2; turn++) {
        auto began = std::chrono::steady_clock::now();
        if (workers.size() == 1) {
            workers[0].step(n);
        } else {
            std::atomic<size_t> done = 0;
            std::vector<std::thread> running;
            for (auto& worker : workers) running.emplace_back([&] { worker.step(n), done++; });
            // As a program whose first thread waits for others, with a look at the time now and then.
            while (done != workers.size()) usleep(100);
            for (auto& thread : running) thread.join();
        }
        if (turn % 4 == 0) allocator::emptyCache();
        // What was given back to the driver is in the totals that come with the next block.
        allocator::allocator.load()->allocate(512).clear();
        auto stats = allocator::getDeviceStats(0);
        if (turns) {
            double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count();
            printf("%lld %.3f\n", (long long)stats.requested_bytes[0].current, ms);
            fflush(stdout);
            continue;
        }
        printf("%lld %lld %lld\n", (long long)stats.allocated_bytes[0].current, (long long)stats.reserved_bytes[0].current,
               (long long)stats.requested_bytes[0].current);
        fflush(stdout);
    }
    _Exit(0);  // The allocator's destructors expect more of CUDA.
}

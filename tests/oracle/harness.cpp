// Drives the unmodified PyTorch caching allocator: commands on stdin, what it did on stdout.
//
//   alloc ID BYTES STREAM     -> "at ID ADDRESS" or "oom ID TEXT"
//   free ID | record ID STREAM | done 0|1 | trim | fraction X
//   begin POOL | end POOL | release POOL                      (private pools, where the release has the calls)
//   stats                     -> one line a statistic
//   layout                    -> one line a segment
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace allocator = c10::cuda::CUDACachingAllocator;
extern "C" uint64_t stub_calls(int);
extern "C" uint64_t stub_used();
extern "C" void stub_set_done(int);

template <class Stat> void print(const Stat& s) {
    printf(" %lld/%lld/%lld/%lld", (long long)s.current, (long long)s.peak, (long long)s.allocated, (long long)s.freed);
}

template <class Array> void print(const char* name, const Array& stats) {
    printf("%s", name);
    for (int i = 0; i < 3; i++) print(stats[i]);  // all, small, large
    puts("");
}

static void print_stats() {
    const auto s = allocator::getDeviceStats(0);
    print("allocation", s.allocation);
    print("segment", s.segment);
    print("active", s.active);
    print("inactive_split", s.inactive_split);
    print("allocated_bytes", s.allocated_bytes);
    print("reserved_bytes", s.reserved_bytes);
    print("active_bytes", s.active_bytes);
    print("inactive_split_bytes", s.inactive_split_bytes);
    print("requested_bytes", s.requested_bytes);
    printf("oversize_allocations"); print(s.oversize_allocations); puts("");
    printf("oversize_segments"); print(s.oversize_segments); puts("");
    printf("retries %lld ooms %lld\n", (long long)s.num_alloc_retries, (long long)s.num_ooms);
#ifdef HAVE_DEVICE_COUNTERS
    printf("device_alloc %lld device_free %lld sync %lld\n", (long long)s.num_device_alloc, (long long)s.num_device_free,
           (long long)s.num_sync_all_streams);
#endif
    printf("stub used %llu\n", (unsigned long long)stub_used());
}

static void print_layout() {
    for (const auto& segment : allocator::snapshot().segments) {
        printf("segment %llx", (unsigned long long)segment.address);
        for (const auto& block : segment.blocks)
            printf(" %llu%c", (unsigned long long)block.size, block.allocated ? 'a' : block.active ? 'p' : '-');
        puts("");
    }
}

// Some releases ask these before they touch a device; they are not in the headers of all.
static void pretend_to_be_initialised() {
    static auto yes = +[](int64_t) { return true; };
    if (auto f = (void (*)(int64_t))dlsym(RTLD_DEFAULT, "_ZN3c104cuda6detail21init_p2p_access_cacheEl")) f(1);
    for (const char* name : {"_ZN3c104cuda9_internal20setHasPrimaryContextEPFbaE", "_ZN3c104cuda9_internal20setHasPrimaryContextEPFblE"})
        if (auto f = (void (*)(void*))dlsym(RTLD_DEFAULT, name)) f((void*)yes);
}

int main() {
    pretend_to_be_initialised();
    try {
        allocator::init(1);
    } catch (const std::exception& e) {
        printf("refused %s\n", std::string(e.what()).substr(0, 300).c_str());
        fflush(stdout);
        _exit(0);
    }
    auto* caching = allocator::allocator.load();
    std::unordered_map<long, c10::DataPtr> live;
    std::vector<c10::cuda::CUDAStream> streams{c10::cuda::getDefaultCUDAStream(0)};
    auto stream = [&](size_t index) {
        while (streams.size() <= index) streams.push_back(c10::cuda::getStreamFromPool(false, 0));
        return streams[index];
    };
    std::string line, verb;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        words >> verb;
        try {
            if (verb == "alloc") {
                long id; size_t bytes, on; words >> id >> bytes >> on;
                c10::cuda::setCurrentCUDAStream(stream(on));
                try {
                    auto pointer = caching->allocate(bytes);
                    printf("at %ld %llx\n", id, (unsigned long long)pointer.get());
                    live.emplace(id, std::move(pointer));
                } catch (const c10::OutOfMemoryError& e) {
                    const std::string text = e.msg();
                    printf("oom %ld ", id);
                    fwrite(text.data(), 1, text.size(), stdout);
                    puts("");
                }
            } else if (verb == "free") { long id; words >> id; live.erase(id);
            } else if (verb == "record") {
                long id; size_t on; words >> id >> on;
                auto found = live.find(id);
                if (found != live.end()) allocator::recordStream(found->second, stream(on));
            } else if (verb == "done") { int done; words >> done; stub_set_done(done);
            } else if (verb == "trim") { allocator::emptyCache();
            } else if (verb == "fraction") { double fraction; words >> fraction; allocator::setMemoryFraction(fraction, 0);
#ifdef HAVE_POOLS
            } else if (verb == "begin") { unsigned long long pool; words >> pool;
                allocator::beginAllocateToPool(0, {0, pool}, [](cudaStream_t) { return true; });
            } else if (verb == "end") { unsigned long long pool; words >> pool; allocator::endAllocateToPool(0, {0, pool});
            } else if (verb == "release") { unsigned long long pool; words >> pool; allocator::releasePool(0, {0, pool});
#endif
            } else if (verb == "stats") { print_stats();
            } else if (verb == "layout") { print_layout(); }
        } catch (const c10::Error& e) {
            printf("error %s\n", std::string(e.what_without_backtrace()).substr(0, 200).c_str());
        } catch (const std::exception& e) {
            printf("error %s\n", e.what());
        }
    }
    fflush(stdout);
    _exit(0);  // The allocator's destructors expect a real device.
}

// Drives the unmodified PyTorch caching allocator: commands on stdin, what it did on stdout.
//
//   run TOTAL DIRECTION       starts a program on a fresh device of TOTAL bytes; DIRECTION 1 hands out ascending addresses
//   alloc ID BYTES STREAM     -> "at ID ADDRESS" or "oom ID TEXT"
//   free ID | record ID STREAM | trim | fraction X | reset
//   done 0|1                  all events are done at once, or none is until `finish`
//   finish STREAM             the events recorded on it so far are done
//   begin POOL | end POOL | release POOL                      (private pools, where the release has the calls)
//   overflow POOL | whole POOL                                (setUseOnOOM, setNoSplit, likewise)
//   watch                     -> from now on "= HASH" of all statistics after every command, and memory that was deleted
//                             cannot be touched: "freed BYTES OFFSET DELETER USER" where that is tried, and no more after it
//   stats                     -> one line a statistic
//   layout                    -> one line a segment
//   time N ROUNDS             -> seconds that the N commands that follow take, ROUNDS times over (alloc and free only)
//   trimpool POOL             (emptyCache of one pool, likewise)
//   stop                      ends the program -> "ended STATUS"
//   live TOTAL DIRECTION      instead of `run`: each command is answered before the next is read, up to `stop`, which ends the process
//
// Every program runs in a fork of its own, so that one process serves thousands of them and an assertion of PyTorch ends
// only one.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <iostream>
#include <new>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "fence.h"

namespace allocator = c10::cuda::CUDACachingAllocator;
extern "C" void stub_set_device(uint64_t total, int ascending);
extern "C" uint64_t stub_used();
extern "C" void stub_set_done(int);
extern "C" void stub_finish(void* stream);

// Gives every statistic to `one`, by name, in a fixed order.
template <class One> void for_each_stat(One one) {
    const auto s = allocator::getDeviceStats(0);
    const auto four = [&](const char* name, int pool, const auto& stat) {
        one(name, 4 * pool, stat.current);
        one(name, 4 * pool + 1, stat.peak);
        one(name, 4 * pool + 2, stat.allocated);
        one(name, 4 * pool + 3, stat.freed);
    };
    const auto array = [&](const char* name, const auto& stats) {
        for (int pool = 0; pool < 3; pool++) four(name, pool, stats[pool]);  // all, small, large
    };
    array("allocation", s.allocation);
    array("segment", s.segment);
    array("active", s.active);
    array("inactive_split", s.inactive_split);
    array("allocated_bytes", s.allocated_bytes);
    array("reserved_bytes", s.reserved_bytes);
    array("active_bytes", s.active_bytes);
    array("inactive_split_bytes", s.inactive_split_bytes);
    array("requested_bytes", s.requested_bytes);
    four("oversize_allocations", 0, s.oversize_allocations);
    four("oversize_segments", 0, s.oversize_segments);
    one("num_alloc_retries", 0, s.num_alloc_retries);
    one("num_ooms", 0, s.num_ooms);
#ifdef HAVE_DEVICE_COUNTERS
    one("num_device_alloc", 0, s.num_device_alloc);
    one("num_device_free", 0, s.num_device_free);
    one("num_sync_all_streams", 0, s.num_sync_all_streams);
#endif
#ifdef HAVE_REJECTIONS
    one("num_oom_rejections", 0, s.num_oom_rejections);
#endif
    one("stub_used", 0, stub_used());
}

static void print_stats() {
    const char* last = nullptr;
    for_each_stat([&](const char* name, int, int64_t value) {
        if (!last || strcmp(last, name)) printf("%s%s", last ? "\n" : "", name);
        last = name;
        printf(" %lld", (long long)value);
    });
    puts("");
}

// FNV-1a over words instead of bytes.
static void print_hash() {
    uint64_t hash = 0xcbf29ce484222325;
    for_each_stat([&](const char*, int, int64_t value) { hash = (hash ^ (uint64_t)value) * 0x100000001b3; });
    printf("= %llx\n", (unsigned long long)hash);
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

// The commands are read beforehand and nothing is printed: what is left is the allocator. `raw_alloc` is the call that
// neither wraps the pointer nor sets a device.
static void time_allocator(std::istream& in, size_t count, size_t rounds) {
    struct Command { size_t id, bytes; };  // no bytes: a free
    std::vector<Command> commands;
    size_t n_ids = 0;
    std::string line, verb;
    while (commands.size() < count && std::getline(in, line)) {
        std::istringstream words(line);
        Command command{0, 0};
        words >> verb >> command.id;
        if (verb == "alloc") words >> command.bytes;
        n_ids = std::max(n_ids, command.id + 1);
        commands.push_back(command);
    }
    std::vector<void*> live(n_ids);
    auto* caching = allocator::allocator.load();
    timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (size_t round = 0; round < rounds; round++)
        for (const Command& command : commands) {
            if (command.bytes) live[command.id] = caching->raw_alloc(command.bytes);
            else caching->raw_delete(live[command.id]);
        }
    clock_gettime(CLOCK_MONOTONIC, &to);
    printf("time %.6f\n", (to.tv_sec - from.tv_sec) + 1e-9 * (to.tv_nsec - from.tv_nsec));
}

static void serve(std::istream& in) {
    auto* caching = allocator::allocator.load();
    auto& live = *new std::unordered_map<long, c10::DataPtr>;  // What is left is not freed at the end.
    std::vector<c10::cuda::CUDAStream> streams{c10::cuda::getDefaultCUDAStream(0)};
    auto stream = [&](size_t index) {
        // As cudaStreamCreate makes them; those of the pool repeat after 32.
        if (index >= 1000) return c10::cuda::getStreamFromExternal(reinterpret_cast<cudaStream_t>(index << 20), 0);
        while (streams.size() <= index) streams.push_back(c10::cuda::getStreamFromPool(false, 0));
        return streams[index];
    };
    bool watches = false;
    std::string line, verb;
    while (std::getline(in, line)) {
        std::istringstream words(line);
        words >> verb;
        unsigned long long pool = 0;
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
            } else if (verb == "finish") { size_t on; words >> on; stub_finish(stream(on).stream());
            } else if (verb == "trim") { allocator::emptyCache();
            } else if (verb == "fraction") { double fraction; words >> fraction; allocator::setMemoryFraction(fraction, 0);
            } else if (verb == "reset") { allocator::resetPeakStats(0);
#if defined(HAVE_POOLS)
            } else if (verb == "begin") { words >> pool; allocator::beginAllocateToPool(0, {0, pool}, [](cudaStream_t) { return true; });
            } else if (verb == "end") { words >> pool; allocator::endAllocateToPool(0, {0, pool});
            } else if (verb == "release") { words >> pool; allocator::releasePool(0, {0, pool});
#elif defined(HAVE_STREAM_POOLS)
            } else if (verb == "begin") { words >> pool; allocator::beginAllocateStreamToPool(0, stream(0).stream(), {0, pool});
            } else if (verb == "end") { allocator::endAllocateStreamToPool(0, stream(0).stream());
            } else if (verb == "release") { words >> pool; allocator::releasePool(0, {0, pool});
#endif
#if defined(HAVE_OVERFLOW_FLAG)
            } else if (verb == "overflow") { words >> pool; allocator::setUseOnOOM(0, {0, pool}, true);
#elif defined(HAVE_OVERFLOW)
            } else if (verb == "overflow") { words >> pool; allocator::setUseOnOOM(0, {0, pool});
#endif
#ifdef HAVE_NO_SPLIT
            } else if (verb == "whole") { words >> pool; allocator::setNoSplit(0, {0, pool});
#endif
#ifdef HAVE_POOL_TRIM
            } else if (verb == "trimpool") { words >> pool; allocator::emptyCache({0, pool});
#endif
            } else if (verb == "watch") { watches = true; fence::raise();
            } else if (verb == "time") { size_t count, rounds; words >> count >> rounds; time_allocator(in, count, rounds);
            } else if (verb == "stats") { print_stats();
            } else if (verb == "layout") { print_layout();
            } else if (verb == "stop") { return;
            } else { printf("error unknown command %s\n", verb.c_str()); }
        } catch (const c10::Error& e) {
            printf("error %s\n", std::string(e.what_without_backtrace()).substr(0, 200).c_str());
        } catch (const std::exception& e) {
            printf("error %s\n", e.what());
        }
        if (watches) print_hash();
    }
}

static void run_program(uint64_t total, int ascending, std::istream& in) {
    stub_set_device(total, ascending);
    pretend_to_be_initialised();
    try {
        allocator::init(1);
        serve(in);
    } catch (const std::exception& e) {
        printf("refused %s\n", std::string(e.what()).substr(0, 300).c_str());
    }
    fflush(stdout);
    _exit(0);  // The allocator's destructors expect a real device.
}

int main() {
    // What was said before a crash has been said. Before anything is said: later, newer C libraries ignore it.
    setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
    std::string line;
    while (std::getline(std::cin, line)) {
        unsigned long long total = 0;
        int ascending = 1, status = 0;
        if (sscanf(line.c_str(), "live %llu %d", &total, &ascending) == 2) run_program(total, ascending, std::cin);
        if (sscanf(line.c_str(), "run %llu %d", &total, &ascending) != 2) continue;
        std::string program;
        while (std::getline(std::cin, line) && line != "stop") program += line + "\n";
        const pid_t child = fork();
        if (child == 0) {
            std::istringstream in(program);
            run_program(total, ascending, in);
        }
        waitpid(child, &status, 0);
        printf("\nended %d\n", status);  // A crash leaves an unfinished line.
        fflush(stdout);
    }
    return 0;
}

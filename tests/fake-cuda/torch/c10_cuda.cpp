// libc10_cuda.so: a caching allocator with PyTorch's boundary and, in small, its habits (CUDACachingAllocator.cpp): 512-byte
// blocks; segments of 2 MiB for requests up to 1 MiB, of 20 MiB below 10 MiB, else multiples of 2 MiB; best fit, split, merge;
// on a failed segment the cache is given back and the request tried once more.
#include "c10.h"

#include <map>
#include <mutex>
#include <new>
#include <set>
#include <tuple>

extern "C" {
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemFree_v2(unsigned long long);
}

namespace {
constexpr size_t MIB = size_t(1) << 20;
constexpr c10::Device DEVICE{c10::DeviceType::CUDA, 0};
thread_local int64_t current_stream = 0;

struct Block {
    char *start;
    size_t bytes;
    int64_t stream;
    bool small, used;
    Block *previous, *next; // in the same segment
};

struct ByFit {
    bool operator()(const Block *a, const Block *b) const
    {
        return std::tie(a->stream, a->bytes, a->start) < std::tie(b->stream, b->bytes, b->start);
    }
};

void give_back(void *start);

class CachingAllocator final : public c10::Allocator {
    std::mutex lock;
    std::set<Block *, ByFit> cached[2]; // large, small
    std::map<void *, Block *> used;
    size_t allocated = 0, reserved = 0;
    bool ready = false;

    void initialize()
    {
        void *context = nullptr;
        if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0)) throw std::bad_alloc();
        ready = true;
    }

    static size_t segment_bytes(size_t bytes)
    {
        if (bytes <= MIB) return 2 * MIB;
        if (bytes < 10 * MIB) return 20 * MIB;
        return (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    }

    Block *from_cache(size_t bytes, bool small)
    {
        Block key{nullptr, bytes, current_stream, small, false, nullptr, nullptr};
        auto found = cached[small].lower_bound(&key);
        if (found == cached[small].end() || (*found)->stream != current_stream) return nullptr;
        Block *block = *found;
        cached[small].erase(found);
        return block;
    }

    Block *new_segment(size_t bytes, bool small)
    {
        size_t size = segment_bytes(bytes);
        unsigned long long start = 0;
        if (cuMemAlloc_v2(&start, size) != 0) return nullptr;
        reserved += size;
        return new Block{reinterpret_cast<char *>(start), size, current_stream, small, false, nullptr, nullptr};
    }

    void split(Block *block, size_t bytes)
    {
        size_t rest = block->bytes - bytes;
        if (block->small ? rest < 512 : rest <= MIB) return;
        Block *tail = new Block{block->start + bytes, rest, block->stream, block->small, false, block, block->next};
        if (tail->next) tail->next->previous = tail;
        block->next = tail;
        block->bytes = bytes;
        cached[block->small].insert(tail);
    }

    // `into` takes up its successor, which is in the cache.
    void merge(Block *into)
    {
        Block *gone = into->next;
        cached[gone->small].erase(gone);
        into->bytes += gone->bytes;
        into->next = gone->next;
        if (gone->next) gone->next->previous = into;
        delete gone;
    }

    void release_cached()
    {
        for (auto &pool : cached) {
            for (auto at = pool.begin(); at != pool.end();) {
                Block *block = *at;
                if (block->previous || block->next) {
                    ++at;
                    continue;
                }
                at = pool.erase(at);
                cuMemFree_v2(reinterpret_cast<unsigned long long>(block->start));
                reserved -= block->bytes;
                delete block;
            }
        }
    }

public:
    c10::DataPtr allocate(size_t requested) override
    {
        std::lock_guard<std::mutex> guard(lock);
        if (!ready) initialize();
        if (requested == 0) return c10::DataPtr(nullptr, give_back, DEVICE);
        size_t bytes = (requested + 511) / 512 * 512;
        bool small = bytes <= MIB;
        Block *block = from_cache(bytes, small);
        if (!block) {
            void *context = nullptr; // the calling thread may be new
            cuDevicePrimaryCtxRetain(&context, 0);
            cuCtxSetCurrent(context);
            block = new_segment(bytes, small);
        }
        if (!block) {
            release_cached();
            block = new_segment(bytes, small);
        }
        if (!block) {
            c10::reportOutOfMemoryToProfiler(int64_t(bytes), allocated, reserved, DEVICE);
            throw std::bad_alloc();
        }
        split(block, bytes);
        block->used = true;
        used[block->start] = block;
        allocated += block->bytes;
        c10::reportMemoryUsageToProfiler(block->start, int64_t(block->bytes), allocated, reserved, DEVICE);
        return c10::DataPtr(block->start, give_back, DEVICE);
    }

    c10::DeleterFnPtr raw_deleter() const override { return give_back; }

    void free(void *start)
    {
        std::lock_guard<std::mutex> guard(lock);
        auto found = used.find(start);
        if (found == used.end()) return;
        Block *block = found->second;
        used.erase(found);
        block->used = false;
        allocated -= block->bytes;
        c10::reportMemoryUsageToProfiler(start, -int64_t(block->bytes), allocated, reserved, DEVICE);
        if (block->next && !block->next->used) merge(block);
        if (block->previous && !block->previous->used) {
            Block *before = block->previous;
            cached[before->small].erase(before); // its size, by which the cache is sorted, changes
            cached[block->small].insert(block);
            merge(before);
            block = before;
        }
        cached[block->small].insert(block);
    }

    void empty_cache()
    {
        std::lock_guard<std::mutex> guard(lock);
        release_cached();
    }
};

// Never destroyed: programs free tensors from destructors that run later.
CachingAllocator &instance = *new CachingAllocator;

void give_back(void *start) { instance.free(start); }
} // namespace

namespace c10::cuda {
Stream getCurrentCUDAStream(int8_t) { return {DEVICE, current_stream}; }
namespace CUDACachingAllocator {
std::atomic<Allocator *> allocator{&instance};
}
} // namespace c10::cuda

// What stands for the rest of PyTorch: tensors by their address, through the allocator's vtable as libtorch does it.
extern "C" API void *fake_torch_empty(size_t bytes)
{
    try {
        return c10::cuda::CUDACachingAllocator::allocator.load()->allocate(bytes).release();
    } catch (const std::bad_alloc &) {
        return nullptr;
    }
}
extern "C" API void fake_torch_delete(void *tensor)
{
    c10::cuda::CUDACachingAllocator::allocator.load()->raw_deleter()(tensor);
}
extern "C" API void fake_torch_set_stream(int64_t id) { current_stream = id; }
extern "C" API void fake_torch_empty_cache() { instance.empty_cache(); }

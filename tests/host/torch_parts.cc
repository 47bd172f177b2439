// Harm: PyTorch's frames and tables, where they are not as in most builds. Two libraries under the names of PyTorch's, and a
// program that uses them: `torch_parts HOW`.
//
//   -DC10_CUDA    an allocator whose table of functions ends where the library has a hole that cannot be read
//   -DTORCH_CPU   operations of the backward pass whose classes were built without RTTI: what stands before their
//                 functions is zero, a small number, an address that cannot be read, or of something else
//
//   HOW    how the allocator and the backward pass are left in the middle: throws (an exception), ends (pthread_exit), is
//          cancelled (pthread_cancel); or returns
#include "../fake-cuda/torch/c10.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <pthread.h>
#include <stdexcept>
#include <sys/mman.h>
#include <unistd.h>

#define EXECUTE                                                                                                        \
    "_ZN5torch8autograd6Engine23execute_with_graph_taskERKSt10shared_ptrINS0_9GraphTaskEES2_INS0_4NodeEEONS0_11InputBufferE"
extern "C" {
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *), cuMemAlloc_v2(unsigned long long *, size_t);
API extern void (*calls_back)();
API extern int n_node;
}
namespace at {
struct RecordFunction { static API uint64_t currentThreadId(); };
namespace sequence_number { API uint64_t get_and_increment(); }
}
API void *execute(void *, void *, const void *, void *, void *) asm(EXECUTE);
constexpr c10::Device DEVICE{c10::DeviceType::CUDA, 0};

#if defined C10_CUDA

void (*calls_back)();
namespace {
void nothing() {}
void *allocate(void *result, void *, size_t bytes)
{
    static long long allocated = 0;
    if (calls_back) calls_back();
    allocated += (bytes + 511) / 512 * 512;
    c10::reportMemoryUsageToProfiler((char *)0x700000000000 + allocated, (bytes + 511) / 512 * 512, allocated, allocated, DEVICE);
    return result;
}
// Three pages; the table is at the end of the first one, with nothing behind it.
alignas(4096) char room[3 * 4096] = {1};
struct Object { void **functions; } object;
__attribute__((constructor)) void begin()
{
    void *table[] = {nullptr, nullptr, (void *)nothing, (void *)nothing, (void *)allocate, (void *)nothing};
    memcpy(room + 4096 - sizeof table, table, sizeof table);
    object.functions = (void **)(room + 4096 - sizeof table) + 2;
    mprotect(room, 4096, PROT_READ);
    mprotect(room + 4096, 4096, PROT_NONE);
}
} // namespace
namespace c10::cuda {
Stream getCurrentCUDAStream(int8_t) { return {DEVICE, 0}; }
namespace CUDACachingAllocator {
std::atomic<Allocator *> allocator{(Allocator *)&object};
}
} // namespace c10::cuda

#elif defined TORCH_CPU

int n_node = -1;
namespace {
struct Description { void *functions; const char *name; } named{nullptr, "N5torch8autograd9generated12GoodBackwardE"}, wild{nullptr, (const char *)16};
alignas(4096) char hole[2 * 4096] = {1};
void *tables[6][2]; // what stands before the functions, and the functions
struct Counts { void *functions = nullptr; int owners = 2, observers = 1; } counts;
uint64_t nodes[6][8];
__attribute__((constructor)) void begin()
{
    mprotect(hole, 4096, PROT_NONE);
    void *before[6] = {&named, nullptr, (void *)24, hole + 64, (void *)"neither", &wild};
    for (int i = 0; i < 6; i++) {
        tables[i][0] = before[i];
        nodes[i][0] = (uint64_t)(tables[i] + 1);
        nodes[i][3] = 100 + i; // sequence_nr_
        nodes[i][6] = 1;       // thread_id_
    }
}
} // namespace
namespace at {
uint64_t RecordFunction::currentThreadId() { return 1; }
namespace sequence_number {
uint64_t get_and_increment() { static uint64_t next = 100; return next++; }
}
}
namespace torch::autograd {
struct Pointer { // as std::shared_ptr: has a destructor, so it is returned through memory
    void *object;
    Counts *counts;
    ~Pointer() { asm volatile(""); }
};
API Pointer get_current_node()
{
    if (n_node < 0) return {nullptr, nullptr};
    counts.owners++;
    return {nodes[n_node], &counts};
}
}
void *execute(void *result, void *, const void *, void *, void *)
{
    if (calls_back) calls_back();
    return result;
}

#else

static const char *how;
static char result[64];

static void leave()
{
    if (strcmp(how, "throws") == 0) throw std::runtime_error("in the middle");
    if (strcmp(how, "ends") == 0) pthread_exit(nullptr);
    if (strcmp(how, "cancelled") == 0) {
        pthread_cancel(pthread_self());
        pthread_testcancel();
    }
}
static c10::Allocator *allocator() { return c10::cuda::CUDACachingAllocator::allocator.load(); }
static void ask(size_t bytes)
{
    using Allocate = void *(*)(void *, void *, size_t);
    Allocate *functions = *(Allocate **)allocator();
    functions[2](result, allocator(), bytes);
}
// From deeper than what was left, but not inside of it.
__attribute__((noinline)) static void report(long bytes)
{
    volatile char room[4000];
    static long long address = 0x710000000000;
    room[0] = 1;
    c10::reportMemoryUsageToProfiler((void *)(address += bytes), bytes, bytes, bytes, DEVICE);
    room[1] = room[0];
}
static int n_caught;
static void left(void (*call)())
{
    calls_back = leave;
    try {
        call();
    } catch (const std::exception &) {
        n_caught++;
    }
    calls_back = nullptr;
}
static void *once(void *number)
{
    if (*(int *)number % 2 == 0) left([] { ask(1000); });
    else left([] { execute(result, nullptr, result, result, result); });
    report(77 * 512);
    at::sequence_number::get_and_increment();
    ask(3000);
    return nullptr;
}
static int can_be_written(void *at)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512], access[8] = "";
    unsigned long start, end;
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%lx-%lx %7s", &start, &end, access) == 3 && start <= (unsigned long)at && (unsigned long)at < end) break;
    fclose(maps);
    return access[1] == 'w';
}

int main(int count, char **words)
{
    unsigned long long address;
    if (count < 2) return 2;
    how = words[1];
    void *context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) || cuMemAlloc_v2(&address, 1 << 20)) return 3;
    report(512); // the first block: from here on PyTorch is known
    printf("functions can be changed: %d\n", can_be_written(*(void **)allocator()));
    for (n_node = 0; n_node < 6; n_node++) ask(512 * (20 + n_node));
    n_node = -1;
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        pthread_create(&thread, nullptr, once, &i);
        pthread_join(thread, nullptr);
    }
    calls_back = nullptr;
    report(78 * 512);
    ask(5000);
    printf("%d caught\n", n_caught);
    return 0;
}

#endif

// A fence around what is deleted: an object of some hundred bytes has a page of its own, which is taken away when it is
// deleted and never given to another. Whoever touches it afterwards is caught, whatever else would have lain there.
//
// libc10_cuda.so finds these operators before those of the C++ library. Until `fence::raise` they are the usual ones.
// A PrivatePool has 248 bytes (2.5) to 376 (2.15). A Block has 160 or so and stays outside: release_available_cached_blocks
// of 2.5 to 2.8 reads the size of a block that it has just deleted, which goes well as long as nobody allocates in between.
#pragma once
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace fence {
#ifdef __aarch64__
constexpr size_t PAGE = 65536, ARENA = size_t(1) << 34;  // the largest page of the kernels that there are
static void* instruction(const ucontext_t* context) { return (void*)context->uc_mcontext.pc; }
#else
constexpr size_t PAGE = 4096, ARENA = size_t(1) << 30;
static void* instruction(const ucontext_t* context) { return (void*)context->uc_mcontext.gregs[REG_RIP]; }
#endif
constexpr size_t SMALLEST = 200, LARGEST = 800;
struct alignas(16) Object {  // lies before what it describes
    size_t bytes;
    void* deleter;
};
static char* arena;
static size_t used;
static Object* deleted;  // by page

static bool has(const void* pointer) { return arena && pointer >= arena && pointer < arena + ARENA; }

static void* make(size_t bytes) {
    if (!arena || bytes < SMALLEST || bytes > LARGEST || used + PAGE > ARENA) {
        if (void* pointer = malloc(bytes ? bytes : 1)) return pointer;
        throw std::bad_alloc();
    }
    auto* object = (Object*)(arena + used);
    used += PAGE;
    *object = {bytes, nullptr};
    return object + 1;
}

static void remove(void* pointer, void* deleter) {
    if (!has(pointer)) return free(pointer);
    auto* object = (Object*)pointer - 1;
    deleted[((char*)object - arena) / PAGE] = {object->bytes, deleter};
    mmap(object, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static void say_place(char* out, size_t size, void* code) {
    Dl_info at{};
    link_map* map = nullptr;
    dladdr1(code, &at, (void**)&map, RTLD_DL_LINKMAP);
    const char* name = at.dli_fname ? strrchr(at.dli_fname, '/') : nullptr;
    snprintf(out, size, "%s+%zx", name ? name + 1 : "?", (size_t)code - (map ? map->l_addr : 0));
}

static void caught(int, siginfo_t* info, void* context) {
    const auto* address = (const char*)info->si_addr;
    if (!has(address) || !deleted[(address - arena) / PAGE].bytes) {
        signal(SIGSEGV, SIG_DFL);
        return;  // It happens again, and ends the program.
    }
    const Object object = deleted[(address - arena) / PAGE];
    char by[256], user[256], line[640];
    say_place(by, sizeof by, object.deleter);
    say_place(user, sizeof user, instruction((const ucontext_t*)context));
    const int n = snprintf(line, sizeof line, "freed %zu %s %s\n", object.bytes, by, user);
    _exit(write(1, line, n) == n ? 0 : 1);
}

static void raise() {
    const int access = PROT_READ | PROT_WRITE, kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    deleted = (Object*)mmap(nullptr, ARENA / PAGE * sizeof(Object), access, kind, -1, 0);
    void* addresses = mmap(nullptr, ARENA, access, kind, -1, 0);
    struct sigaction action{};
    action.sa_sigaction = caught;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, nullptr);
    arena = (char*)addresses;
}
}  // namespace fence

void* operator new(size_t bytes) { return fence::make(bytes); }
void operator delete(void* pointer) noexcept { fence::remove(pointer, __builtin_return_address(0)); }
void operator delete(void* pointer, size_t) noexcept { fence::remove(pointer, __builtin_return_address(0)); }

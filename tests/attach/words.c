/* Keeps the driver's functions as a copy of the CUDA runtime does: resolved once, by `dlsym` and `cuGetProcAddress`, in words of its own
 * data. Follows its standard input: `go N` gives out and takes back N times, `hold N` gives out N that stay, `drop` takes those back,
 * `fork N` asks N times in a child, `filter` puts the process under a filter of system calls.
 * Each answer is a line: how many of the words are not as they were at first.
 * Meanwhile a thread holds its breath: it calls the kernel again and again, and looks whether anything of its own has changed:
 * registers, vector registers, signal mask, signal stack, errno. With LIBRARY it is a library with `go` and `words_changed`, and no thread.
 * With RUNTIME it asks a CUDA runtime, with TORCH the stand-in for PyTorch's allocator, which have such words of their own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <immintrin.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(yes) do { if (!(yes)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #yes); _exit(1); } } while (0)

#ifdef RUNTIME
int cudaMalloc(unsigned long long *, size_t), cudaFree(unsigned long long);
static void resolve(void) { CHECK(cudaFree(0) == 0); }
static int give(unsigned long long *at, size_t bytes) { return cudaMalloc(at, bytes); }
static int take(unsigned long long at) { return cudaFree(at); }
int words_changed(void) { return 0; }
#elif defined TORCH
void *fake_torch_empty(size_t), fake_torch_delete(void *);
static void resolve(void) { fake_torch_delete(fake_torch_empty(1 << 20)); }
static int give(unsigned long long *at, size_t bytes) { return !(*at = (unsigned long long)fake_torch_empty(bytes)); }
static int take(unsigned long long at) { fake_torch_delete((void *)at); return 0; }
int words_changed(void) { return 0; }
#else
typedef int (*Find)(const char *, void **, int, uint64_t, void *);
static struct {
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*current)(void *);
    int (*alloc)(unsigned long long *, size_t);
    int (*free)(unsigned long long);
    Find find;
} words;
enum { WORDS = sizeof words / sizeof(void *) };
/* Not recognised as addresses. */
static uintptr_t as_they_were[WORDS];

static uintptr_t word(int index)
{
    uintptr_t value;
    memcpy(&value, (char *)&words + index * sizeof value, sizeof value);
    return value;
}

static void resolve(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    CHECK(driver);
    *(void **)&words.find = dlsym(driver, "cuGetProcAddress_v2");
    *(void **)&words.init = dlsym(driver, "cuInit");
    *(void **)&words.retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&words.current = dlsym(driver, "cuCtxSetCurrent");
    CHECK(words.find && words.find("cuMemAlloc", (void **)&words.alloc, 12000, 0, NULL) == 0);
    CHECK(words.find("cuMemFree", (void **)&words.free, 12000, 0, NULL) == 0);
    for (int i = 0; i < WORDS; i++) as_they_were[i] = ~word(i);
    CHECK(words.init(0) == 0 && words.retain(&context, 0) == 0 && words.current(context) == 0);
}

int words_changed(void)
{
    int n = 0;
    for (int i = 0; i < WORDS; i++) n += ~word(i) != as_they_were[i];
    return n;
}

static int give(unsigned long long *at, size_t bytes) { return words.alloc(at, bytes); }
static int take(unsigned long long at) { return words.free(at); }
#endif

enum { HELD = 100 };
static unsigned long long held[HELD];
static int n_held;

void hold(int n)
{
    for (int i = 0; i < n; i++) CHECK(give(&held[n_held++ % HELD], 1 << 20) == 0);
}

void drop(void)
{
    while (n_held) CHECK(take(held[--n_held]) == 0);
}

void go(int n)
{
    unsigned long long at;
    for (int i = 0; i < n; i++) {
        CHECK(give(&at, 12345) == 0 && at);
        CHECK(take(at) == 0);
    }
}

#ifdef LIBRARY
__attribute__((constructor)) static void begin(void) { resolve(); }
#else
static volatile int stop;

/* Calls the kernel with known values in all registers that it keeps. */
__attribute__((target("avx2"), noinline)) static void hold_vectors(long number, long first)
{
    uint64_t before[32], after[32], general[6];
    for (int i = 0; i < 32; i++) before[i] = 0x9e3779b97f4a7c15ull * (i + 1 + number);
    __asm__ volatile(
        "vmovdqu (%[from]), %%ymm0; vmovdqu 32(%[from]), %%ymm5; vmovdqu 64(%[from]), %%ymm9; vmovdqu 96(%[from]), %%ymm15\n"
        "mov $111, %%r12; mov $222, %%r13; mov $333, %%r8; mov $444, %%r9; mov $555, %%rdx; xor %%esi, %%esi\n"
        "mov %[number], %%rax; mov %[first], %%rdi; xor %%r10d, %%r10d; syscall\n"
        "vmovdqu %%ymm0, (%[to]); vmovdqu %%ymm5, 32(%[to]); vmovdqu %%ymm9, 64(%[to]); vmovdqu %%ymm15, 96(%[to])\n"
        "mov %%r12, (%[out]); mov %%r13, 8(%[out]); mov %%r8, 16(%[out]); mov %%r9, 24(%[out]); mov %%rdx, 32(%[out]); mov %%rax, 40(%[out])\n"
        :: [from] "r"(before), [to] "r"(after), [out] "b"(general), [number] "m"(number), [first] "m"(first)
        : "rax", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13", "xmm0", "xmm5", "xmm9", "xmm15", "memory");
    CHECK(memcmp(before, after, 128) == 0);
    CHECK(general[0] == 111 && general[1] == 222 && general[2] == 333 && general[3] == 444 && general[4] == 555);
    CHECK((long)general[5] == (number == SYS_getpid ? getpid() : 0));
}

static void *breathless(void *unused)
{
    static char stack[64 << 10];
    stack_t own = {.ss_sp = stack, .ss_size = sizeof stack}, now;
    sigset_t mask, mask_now;
    struct timespec brief = {0, 300000};
    CHECK(sigaltstack(&own, NULL) == 0);
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    int has_avx = __builtin_cpu_supports("avx2");
    errno = 77;
    for (long i = 0; !stop; i++) {
        if (has_avx) hold_vectors(i % 2 ? SYS_getpid : SYS_sched_yield, 0);
        if (has_avx && i % 8 == 0) hold_vectors(SYS_nanosleep, (long)&brief);
        CHECK(errno == 77);
        if (i % 64) continue;
        CHECK(sigaltstack(NULL, &now) == 0 && now.ss_sp == own.ss_sp && now.ss_flags == 0 && now.ss_size == own.ss_size);
        pthread_sigmask(SIG_SETMASK, NULL, &mask_now);
        CHECK(memcmp(&mask, &mask_now, 8) == 0);
    }
    return unused;
}

/* Calls as before, under a filter that allows everything. */
static void filter(void)
{
    struct sock_filter all[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {1, all};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* A child that asks for memory by the words that it has from us. */
static void in_a_child(int n)
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        for (int i = 0; i < n; i++) {
            unsigned long long at;
            give(&at, 12345); /* The driver may refuse a child; it must not crash. */
        }
        _exit(0);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
}

int main(void)
{
    char line[64];
    pthread_t thread;
    resolve();
    CHECK(pthread_create(&thread, NULL, breathless, NULL) == 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("ready\n");
    while (fgets(line, sizeof line, stdin)) {
        if (!strncmp(line, "go ", 3)) go(atoi(line + 3));
        if (!strncmp(line, "hold ", 5)) hold(atoi(line + 5));
        if (!strncmp(line, "drop", 4)) drop();
        if (!strncmp(line, "fork ", 5)) in_a_child(atoi(line + 5));
        if (!strncmp(line, "filter", 6)) filter();
        printf("%d\n", words_changed());
    }
    stop = 1;
    pthread_join(thread, NULL);
    printf("as it was\n");
    return 0;
}
#endif

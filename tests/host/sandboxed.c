/* Harm: a program that puts a sandbox on itself after CUDA has begun, which kills whoever makes a call that the program does
 * not make, was killed at its exit, in a new thread, or in an allocation from a new place.
 * sandboxed HOW [MICROSECONDS]: plain, places, threads, signal, stacks, inside, handler, all, fork. Each allows what it needs itself.
 * `stacks` is on a stack of its own when the filter comes and right after it, as a coroutine is; `inside` puts it on there. A signal
 * handler puts it on in `handler`, and another thread on all threads in `all`, after so many microseconds of events. `fork` makes
 * children afterwards. */
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

/* What a program of one thread needs that says a word and ends; the driver asks which process it is in. */
static const int for_all[] = { SYS_write, SYS_exit_group, SYS_getpid };
/* What the C library needs beside that for threads. */
static const int for_threads[] = {
    SYS_mmap, SYS_munmap, SYS_mprotect, SYS_madvise, SYS_clone, SYS_clone3, SYS_set_robust_list, SYS_rseq,
    SYS_rt_sigprocmask, SYS_rt_sigaction, SYS_rt_sigreturn, SYS_futex, SYS_exit, SYS_brk, SYS_openat, SYS_read, SYS_close,
};
static const int for_signals[] = { SYS_getpid, SYS_gettid, SYS_tgkill, SYS_rt_sigprocmask, SYS_rt_sigreturn };

/* What the C library needs for memory. */
static const int for_memory[] = { SYS_brk, SYS_mmap, SYS_munmap, SYS_mremap };
static const int for_children[] = { SYS_clone, SYS_wait4, SYS_set_robust_list, SYS_gettid };

static struct sock_filter filter[256];
static unsigned short length;
static volatile int is_put, is_ready;

static void put(unsigned flags)
{
    struct sock_fprog program = { length, filter };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program))
        _exit(9);
    is_put = 1;
}

static void allow(const int *calls, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], 0, 1);
        filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
}

static void take(int n)
{
    address p;
    while (n--)
        cuMemAlloc_v2(&p, 1 << 20);
}

__attribute__((noinline)) static int deep(int n)
{
    volatile char room[64];
    room[0] = n;
    if (n == 0)
        take(1);
    return n ? deep(n - 1) + room[0] : 0;
}

static void *work(void *unused)
{
    take(1);
    deep(20);
    return unused;
}

static void handler(int signal)
{
    (void)signal;
    take(1);
}

static void putting_handler(int signal)
{
    (void)signal;
    put(0);
}

static void *put_on_all(void *microseconds)
{
    /* Nobody is inside of pthread_create any more. */
    while (!is_ready)
        ;
    usleep(*(int *)microseconds);
    put(SECCOMP_FILTER_FLAG_TSYNC);
    for (;;)
        ;
    return 0;
}

static int inside(int depth)
{
    put(0);
    return deep(depth);
}

/* Calls `function(depth)` on another stack, without a system call. */
static void on_stack(char *top, int (*function)(int), int depth)
{
#if defined __x86_64__
    __asm__ volatile("movq %%rsp, %%rbx\n\tmovq %1, %%rsp\n\tcall *%2\n\tmovq %%rbx, %%rsp"
                     : "+D"(depth)
                     : "r"(top), "r"(function)
                     : "rbx", "rax", "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "memory", "cc");
#else
    (void)top;
    function(depth);
#endif
}

enum { STACK = 256 << 10, STACKS = 100 };

static char *new_stack(void)
{
    char *at = mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at != MAP_FAILED)
        mprotect(at, 4096, PROT_NONE);
    return at == MAP_FAILED ? 0 : at + STACK - 64;
}

int main(int n, char **arguments)
{
    const char *how = n > 1 ? arguments[1] : "plain";
    cuInit(0);
    take(10);
    signal(SIGUSR1, handler);
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
#define ALLOW(calls) allow(calls, sizeof calls / sizeof *calls)
    ALLOW(for_all);
    if (!strcmp(how, "threads"))
        ALLOW(for_threads);
    if (!strcmp(how, "signal"))
        ALLOW(for_signals);
    if (strcmp(how, "plain") && strcmp(how, "places"))
        ALLOW(for_memory);
    if (!strcmp(how, "handler"))
        ALLOW(for_signals);
    if (!strcmp(how, "fork"))
        ALLOW(for_children);
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    int microseconds = n > 2 ? atoi(arguments[2]) : 5000;
    char *stacks[STACKS];
    for (int i = 0; i < STACKS; i++)
        if (!(stacks[i] = new_stack()))
            return 7;
    char *known = new_stack(), *unknown = new_stack();
    if (!known || !unknown)
        return 7;
    if (!strcmp(how, "stacks")) {
        on_stack(known, deep, 150);
        usleep(30000);
        on_stack(known, deep, 150);
    }
    pthread_t other;
    int is_other = !strcmp(how, "handler") || !strcmp(how, "all");
    if (!strcmp(how, "handler")) {
        struct itimerval once = { { 0, 0 }, { 0, microseconds } };
        signal(SIGALRM, putting_handler);
        setitimer(ITIMER_REAL, &once, 0);
    } else if (!strcmp(how, "all")) {
        pthread_create(&other, 0, put_on_all, &microseconds);
        is_ready = 1;
    } else if (!strcmp(how, "inside")) {
        on_stack(stacks[0], inside, 150);
    } else {
        put(0);
    }
    for (int i = 0; is_other && i < 300; i++)
        on_stack(stacks[i % STACKS], deep, 150);
    while (!is_put)
        ;
    if (is_other || !strcmp(how, "inside"))
        for (int i = 0; i < STACKS; i++)
            on_stack(stacks[i], deep, 150);
    if (!strcmp(how, "fork"))
        for (int i = 0; i < 3; i++) {
            int status = 0;
            pid_t child = fork();
            if (child == 0) {
                cuInit(0);
                take(1);
                on_stack(stacks[i], deep, 150);
                _exit(0);
            }
            if (wait4(child, &status, 0, 0) != child || status)
                return 6;
            on_stack(stacks[i + 50], deep, 150);
        }
    take(10);
    if (!strcmp(how, "places"))
        for (int i = 0; i < 50; i++)
            deep(i * 5);
    if (!strcmp(how, "threads"))
        for (int i = 0; i < 50; i++) {
            pthread_t thread;
            pthread_create(&thread, 0, work, 0);
            pthread_join(thread, 0);
        }
    if (!strcmp(how, "signal"))
        for (int i = 0; i < 50; i++)
            raise(SIGUSR1);
    if (!strcmp(how, "stacks"))
        for (int i = 0; i < 100; i++)
            on_stack(i % 2 ? known : unknown, deep, 150 + i / 2 * 5 % 50);
    if (write(1, "done\n", 5) != 5)
        return 8;
    return 0;
}

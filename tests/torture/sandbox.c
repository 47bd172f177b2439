/* A sandbox that comes when the program has begun, and allows what the program does itself and nothing else: `sandbox TURNS [THREADS]`.
 * The filter kills; it holds for all threads, for those that come later, and to the end of the process. */
#include "torture.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/syscall.h>

/* To say a word, and to end. */
static const int for_all[] = {SYS_write, SYS_exit_group, SYS_newfstatat, SYS_fstat};
/* What the C library needs for threads beside that. */
static const int for_threads[] = {
    SYS_mmap, SYS_munmap, SYS_mprotect, SYS_madvise, SYS_clone, SYS_clone3, SYS_set_robust_list, SYS_rseq, SYS_rt_sigprocmask,
    SYS_futex, SYS_exit, SYS_brk, SYS_gettid, SYS_getpid, SYS_sched_getaffinity,
};
static struct sock_filter filter[128];
static unsigned short length;

static void allow(const int *calls, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], 0, 1);
        filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    }
}

static void confine(int with_threads)
{
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    allow(for_all, sizeof for_all / sizeof *for_all);
    if (with_threads) allow(for_threads, sizeof for_threads / sizeof *for_threads);
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    struct sock_fprog program = {length, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program))
        die("seccomp");
}

static void *turn(void *n) { return (void *)work((long)n); }

int main(int argc, char **argv)
{
    long turns = argc > 1 ? atol(argv[1]) : 10;
    int threads = argc > 2 ? atoi(argv[2]) : 0;
    begin();
    long failed = work(5);
    /* The C library finds what it needs now. */
    printf("before: %ld failed\n", failed);
    fflush(stdout);
    void *waiting[8];
    for (int i = 0; i < threads && i < 8; i++) waiting[i] = start(work_on, NULL);
    confine(threads);
    failed += work(turns);
    for (int i = 0; i < threads * 20; i++) failed += (long)join(start(turn, (void *)5L));
    stop = 1;
    for (int i = 0; i < threads && i < 8; i++) join(waiting[i]);
    printf("after: %ld failed\n", failed);
    return failed != 0;
}

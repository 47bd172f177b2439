/* A sandbox that leaves calls to a handler of the program, as browsers have it: `broker TURNS`. It is there before CUDA is. */
#include "torture.h"
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <ucontext.h>

/* The sixth argument of what the handler itself calls: the filter lets that through. */
enum { MARK = 0x5a5a1234 };
static const int trapped[] = {SYS_openat, SYS_newfstatat, SYS_readlinkat, SYS_unlinkat, SYS_memfd_create};

static void make_call(int signal, siginfo_t *info, void *context)
{
    (void)signal;
#ifdef __x86_64__
    greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
    long words[5] = {at[REG_RDI], at[REG_RSI], at[REG_RDX], at[REG_R10], at[REG_R8]};
#else
    unsigned long long *at = ((ucontext_t *)context)->uc_mcontext.regs;
    long words[5] = {at[0], at[1], at[2], at[3], at[4]};
#endif
    int before = errno;
    long answer = syscall(info->si_syscall, words[0], words[1], words[2], words[3], words[4], (long)MARK);
    if (answer < 0) answer = -errno;
    errno = before;
#ifdef __x86_64__
    at[REG_RAX] = answer;
#else
    at[0] = answer;
#endif
}

static void confine(void)
{
    static struct sock_filter filter[64];
    unsigned short length = 0;
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[5]));
    filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MARK, 0, 1);
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (size_t i = 0; i < sizeof trapped / sizeof *trapped; i++) {
        filter[length++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)trapped[i], 0, 1);
        filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    }
    filter[length++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sigaction action = {.sa_sigaction = make_call, .sa_flags = SA_SIGINFO | SA_NODEFER};
    struct sock_fprog program = {length, filter};
    if (sigaction(SIGSYS, &action, NULL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        die("seccomp");
}

int main(int argc, char **argv)
{
    confine();
    begin();
    long failed = work(argc > 1 ? atol(argv[1]) : 10);
    int file = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
    printf("%ld failed, %s\n", failed, file < 0 ? "nothing can be opened" : "files can be opened");
    return failed != 0;
}

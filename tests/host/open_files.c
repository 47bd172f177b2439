/* Harm: on kernels without close_range (before 5.9; here a seccomp filter refuses it, or with `kills` ends whoever calls
 * it or other rare calls) the recorder kept descriptors from 1024 on, so that the reader of a pipe waited for ever. And a ring
 * in memory was opened by the number of the program's descriptor, which may be another file by then: everything
 * was lost (`closes`). */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);
int cuMemFree_v2(address);

#define NUMBER BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))
#define REFUSE(call, how) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1), BPF_STMT(BPF_RET | BPF_K, how)

static void filter(int kills)
{
    struct sock_filter refuses[] = { NUMBER, REFUSE(436, SECCOMP_RET_ERRNO | ENOSYS),
                                     BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
    struct sock_filter ends[] = { NUMBER,
                                  REFUSE(436, SECCOMP_RET_KILL_PROCESS),
                                  REFUSE(434, SECCOMP_RET_KILL_PROCESS), /* pidfd_open */
                                  REFUSE(SYS_memfd_create, SECCOMP_RET_KILL_PROCESS),
                                  REFUSE(SYS_process_vm_readv, SECCOMP_RET_KILL_PROCESS),
                                  REFUSE(SYS_membarrier, SECCOMP_RET_KILL_PROCESS),
                                  REFUSE(SYS_fallocate, SECCOMP_RET_KILL_PROCESS),
                                  REFUSE(SYS_sched_setaffinity, SECCOMP_RET_KILL_PROCESS),
                                  BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
    struct sock_fprog program = { kills ? sizeof ends / sizeof *ends : sizeof refuses / sizeof *refuses,
                                  kills ? ends : refuses };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        puts("no filter");
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "";
    address p;
    int ends[2];
    struct rlimit many = { 4096, 4096 };
    setrlimit(RLIMIT_NOFILE, &many);
    if (pipe(ends))
        return 1;
    int high = fcntl(ends[1], F_DUPFD, 2000);
    close(ends[1]);
    if (!strcmp(how, "refuses") || !strcmp(how, "kills"))
        filter(how[0] == 'k');
    cuInit(0);
    cuMemAlloc_v2(&p, 1 << 20);
    if (!strcmp(how, "closes")) {
        for (int file = 3; file < 100; file++)
            if (file != ends[0])
                close(file);
        if (open("/dev/null", O_RDWR) < 0)
            return 1;
    }
    for (int i = 0; i < 100; i++) {
        cuMemAlloc_v2(&p, 1 << 20);
        cuMemFree_v2(p);
    }
    close(high);
    struct pollfd reader = { ends[0], POLLIN, 0 };
    int n = poll(&reader, 1, 20000);
    printf("the reader sees the end: %d\n", n == 1 && (reader.revents & POLLHUP) != 0);
    return 0;
}

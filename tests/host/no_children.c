/* Harm: that the recorder could not be started was said in words that were not true. The kernel refuses this program children:
 *
 *   no_children FIRST SECOND    errors for a child that is made without a signal at its end, and for one that is made with
 *                               SIGCHLD, as the recorder is by the first; 0: it may be made
 *
 * by a seccomp filter on clone(2); its first allocation then asks for a recorder. */
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define ANSWER(error) BPF_STMT(BPF_RET | BPF_K, (error) ? SECCOMP_RET_ERRNO | (unsigned)(error) : SECCOMP_RET_ALLOW)

int main(int count, char **words)
{
    address p;
    if (count < 3) return 2;
    int first = atoi(words[1]), second = atoi(words[2]);
    struct sock_filter lines[] = {
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 4),
        LOAD(args[0]),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, 0xff),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SIGCHLD, 2, 0),
        ANSWER(first),
        ANSWER(0),
        ANSWER(second),
    };
    struct sock_fprog filter = { sizeof lines / sizeof *lines, lines };
    if (first || second) {
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) return 3;
    }
    cuInit(0);
    printf("%d\n", cuMemAlloc_v2(&p, 1 << 20));
    return 0;
}

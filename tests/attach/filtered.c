/* A process of which one thread has put itself under a filter of system calls, as sandboxes within a process do: any call but those that it
 * makes itself ends the process. The main thread waits in a call that nobody interrupts. `filtered early` has its filter from the start;
 * `filtered late` puts it on, and waits where it can be interrupted, only once SIGUSR1 has come. */
#include "../programs/api.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ALLOWED(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static void nothing(int signal)
{
    (void)signal;
}

static void say(const char *word)
{
    CHECK(write(1, word, strlen(word)) == (ssize_t)strlen(word));
}

static void *work(void *is_late)
{
    struct sock_filter calls[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOWED(read), ALLOWED(write), ALLOWED(exit_group), ALLOWED(rt_sigreturn), ALLOWED(restart_syscall),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog filter = {sizeof calls / sizeof *calls, calls};
    char byte;
    if (is_late) {
        say("ready\n");
        pause();
    }
    CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter));
    if (!is_late) say("ready\n");
    while (read(0, &byte, 1) > 0) {}
    say("as it was\n");
    syscall(SYS_exit_group, 0);
    return NULL;
}

int main(int argc, char **argv)
{
    void *context;
    pthread_t thread;
    sigset_t wakes;
    CHECK(argc == 2);
    signal(SIGUSR1, nothing);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    CHECK(!pthread_create(&thread, NULL, work, strcmp(argv[1], "late") ? NULL : argv));
    sigemptyset(&wakes);
    sigaddset(&wakes, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &wakes, NULL);
    for (;;) pause();
}

/* Harm: where the program is PID 1 of its namespace, or asked for orphans (`reaper`), the recorder became its child: a
 * loop of wait() never ended. Says what every way of waiting finds, before it has children, with three, and after. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

static volatile int n_signals;
static void count(int signal) { (void)signal; n_signals++; }

static void ask(const char *when)
{
    siginfo_t info = { 0 };
    int one = waitpid(-1, 0, WNOHANG), error = one < 0 ? errno : 0;
    int other = waitid(P_ALL, 0, &info, WEXITED | WNOHANG), other_error = other < 0 ? errno : 0;
    printf("%s: waitpid %d, ECHILD %d; waitid %d, ECHILD %d\n", when, one, error == ECHILD, other, other_error == ECHILD);
}

int main(int argc, char **argv)
{
    setvbuf(stdout, 0, _IONBF, 0);
    if (argc > 1 && !strcmp(argv[1], "reaper"))
        prctl(PR_SET_CHILD_SUBREAPER, 1);
    signal(SIGCHLD, count);
    address p;
    cuInit(0);
    cuMemAlloc_v2(&p, 1 << 20);
    ask("after an allocation");
    int n = 0;
    for (int i = 0; i < 3; i++)
        if (!fork())
            _exit(0);
    for (;;) {
        int child = wait(0);
        if (child > 0)
            n++;
        else if (errno != EINTR)
            break;
    }
    printf("%d children, then ECHILD %d; signals: %s\n", n, errno == ECHILD, n_signals >= 1 && n_signals <= 3 ? "theirs" : "others");
    for (int i = 0; i < 20; i++)
        usleep(10000);
    ask("at the end");
    printf("signals: %s\n", n_signals <= 3 ? "theirs" : "others");
    return 0;
}

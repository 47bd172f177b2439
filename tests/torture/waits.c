/* A parent that waits for whoever is its child, as an init, a shell or a launcher of jobs does: there must never be one that it did not
 * make, and when its own are gone `wait` must say so at once. Run plainly, as a subreaper and as PID 1. */
#include "torture.h"

static volatile sig_atomic_t signals;
static void on_child(int signal)
{
    (void)signal;
    signals++;
}

static pid_t child(int code, long n)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid != 0) return pid;
    in_child();
    work(n);
    _exit(code);
}

int main(int argc, char **argv)
{
    long childs_work = argc > 1 && !strcmp(argv[1], "family") ? 200 : 0;
    struct sigaction action = {.sa_handler = on_child, .sa_flags = SA_RESTART | SA_NOCLDSTOP};
    int status;
    sigaction(SIGCHLD, &action, NULL);
    begin();
    work(100);
    /* Nobody is there yet. */
    rest(300000);
    CHECK(signals == 0);
    CHECK(waitpid(-1, &status, WNOHANG) == -1 && errno == ECHILD);
    CHECK(wait(&status) == -1 && errno == ECHILD);
    siginfo_t info;
    CHECK(waitid(P_ALL, 0, &info, WEXITED | WNOHANG) == -1 && errno == ECHILD);
    work(100);

    /* One child without CUDA, one with a session of its own, one that is stopped on the way. */
    pid_t plain = child(3, 0), busy = child(4, childs_work);
    int seen = 0, foreign = 0;
    for (pid_t pid; (pid = wait(&status)) > 0;) {
        if (pid == plain && WEXITSTATUS(status) == 3) seen |= 1;
        else if (pid == busy && WEXITSTATUS(status) == 4) seen |= 2;
        else foreign++;
    }
    printf("own children %d, foreign %d, then %s\n", seen, foreign, errno == ECHILD ? "none" : strerror(errno));
    int turns = 0;
    child(5, childs_work);
    while (waitpid(-1, &status, WNOHANG) == 0) rest(1000), turns++;
    printf("ended with %d, waited %s\n", WEXITSTATUS(status), turns >= 0 ? "yes" : "no");
    CHECK(waitpid(-1, &status, WNOHANG) == -1 && errno == ECHILD);
    CHECK(waitpid(-1, &status, __WALL | WNOHANG) <= 0);
    rest(200000);
    CHECK(signals >= 1 && signals <= 3);
    work(100);
    return 0;
}

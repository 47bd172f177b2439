/* New processes by every road, one after the other, while other threads allocate: `storm ROAD COUNT`. A child either ends at once, calls
 * the driver and makes a session of its own, or becomes another program (this one, with `child`). */
#include "torture.h"
#include <linux/sched.h>
#include <sched.h>
#include <spawn.h>
#include <sys/syscall.h>

static const char *self;
static char *arguments[] = {"storm", "child", NULL};
extern char **environ;

static int in_clone(void *unused)
{
    (void)unused;
    in_child();
    work(5);
    _exit(7);
}

/* Makes a child; the answer is what it must end with. */
static pid_t by(const char *road, int turn, int *code)
{
    pid_t pid = -1;
    *code = 7;
    if (!strcmp(road, "fork")) {
        if ((pid = fork()) == 0) {
            in_child();
            if (turn % 2) work(5);
            _exit(7);
        }
    } else if (!strcmp(road, "exec")) {
        if ((pid = fork()) == 0) {
            if (turn % 2) in_child(), work(5);
            execv(self, arguments);
            _exit(127);
        }
    } else if (!strcmp(road, "vfork")) {
        if ((pid = vfork()) == 0) {
            if (turn % 2) execv(self, arguments);
            _exit(7);
        }
    } else if (!strcmp(road, "spawn")) {
        if (posix_spawn(&pid, self, NULL, NULL, arguments, environ)) die("posix_spawn");
    } else if (!strcmp(road, "clone")) {
        /* A child with memory of its own and a stack that we choose, past the C library's fork handlers. */
        static _Alignas(16) char stack[1 << 16];
        pid = clone(in_clone, stack + sizeof stack, SIGCHLD, NULL);
    } else if (!strcmp(road, "system")) {
        if (system("exit 7") != 7 << 8) printf("system\n");
        return 0;
    }
    if (pid < 0) die(road);
    return pid;
}

int main(int argc, char **argv)
{
    char path[4096];
    if (argc == 2 && !strcmp(argv[1], "child")) {
        begin();
        return work(5) ? 1 : 7;
    }
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    self = path;
    begin();
    work(1);
    void *threads[4];
    for (int i = 0; i < 4; i++) threads[i] = start(work_on, (void *)500L);
    int wrong = 0, count = argc > 2 ? atoi(argv[2]) : 10;
    for (int i = 0; i < count; i++) {
        int code, status = 0;
        pid_t pid = by(argv[1], i, &code);
        work(3);
        if (pid && (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) != code)) {
            wrong++;
            printf("child %d ended with %x\n", i, status);
        }
    }
    stop = 1;
    for (int i = 0; i < 4; i++) join(threads[i]);
    int status;
    CHECK(waitpid(-1, &status, WNOHANG) == -1 && errno == ECHILD);
    printf("%d children by %s, %d wrong\n", count, argv[1], wrong);
    return wrong != 0;
}

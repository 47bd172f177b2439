/* Becomes another program while somebody looks for a thread to borrow, and its memory from before lives on in a child that shares it: whoever
 * opened that memory would still find it. Addresses are not random, so that both programs have the C library at the same place; only the first
 * has the driver. Nothing can be borrowed before SIGUSR1 comes, which has it begin anew: it then waits for the end of its input. */
#include "../programs/api.h"

#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { STACK = 1 << 16 };

static void nothing(int signal)
{
    (void)signal;
}

static int sleeps(void *unused)
{
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
}

int main(int argc, char **argv)
{
    char byte;
    CHECK(argc == 2);
    if (!strcmp(argv[1], "begin")) {
        CHECK(personality(ADDR_NO_RANDOMIZE) >= 0);
        execl("/proc/self/exe", argv[0], "first", NULL);
        return 1;
    }
    if (!strcmp(argv[1], "first")) {
        char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(dlopen("libcuda.so.1", RTLD_NOW));
        CHECK(stack != MAP_FAILED && clone(sleeps, stack + STACK, CLONE_VM | SIGCHLD, NULL) > 0);
        signal(SIGUSR1, nothing);
        CHECK(write(1, "ready\n", 6) == 6);
        pause();
        execl("/proc/self/exe", argv[0], "second", NULL);
        return 1;
    }
    while (read(0, &byte, 1) > 0) {}
    CHECK(write(1, "as it was\n", 10) == 10);
    _exit(0);
}

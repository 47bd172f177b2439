/* A timer's handler that jumps out of whatever it interrupted, calls of the driver among it, as a language's timeouts do: `jumps SECONDS`.
 * After each jump the thread goes on, and what it does then must be recorded again. */
#include "torture.h"
#include <setjmp.h>
#include <sys/time.h>

static sigjmp_buf back;
static volatile sig_atomic_t may_jump, jumps;
static void on_alarm(int signal)
{
    (void)signal;
    if (!may_jump) return;
    may_jump = 0;
    jumps++;
    siglongjmp(back, 1);
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 100;
    struct itimerval each = {{0, 1000}, {0, 1000}};
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    begin();
    work(10);
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &each, NULL);
    while (jumps < count) {
        if (sigsetjmp(back, 1) == 0) {
            may_jump = 1;
            for (;;) work(1);
        }
        work(3);
    }
    memset(&each, 0, sizeof each);
    setitimer(ITIMER_REAL, &each, NULL);
    printf("jumped %d times, then %ld failed\n", count, work(1000));
    return 0;
}

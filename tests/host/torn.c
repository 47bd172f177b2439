/* Harm: a signal handler that leaves an allocation by siglongjmp left the thread unseen from then on. A timer tears this
 * one out of calls 300 times, at whatever instruction of the program, the library or the driver it comes; then 1,000
 * allocations of 3 MiB are made in peace. It takes its time between calls, so that all of them fit into the ring whoever
 * empties it. */
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/time.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);
int cuMemFree_v2(address);

static sigjmp_buf back;
static volatile int torn;

static void tear(int signal)
{
    (void)signal;
    torn++;
    siglongjmp(back, 1);
}

int main(void)
{
    address p;
    cuInit(0);
    cuMemAlloc_v2(&p, 1 << 20);
    signal(SIGALRM, tear);
    struct itimerval timer = { { 0, 1000 }, { 0, 1000 } }, off = { { 0, 0 }, { 0, 0 } };
    setitimer(ITIMER_REAL, &timer, 0);
    sigsetjmp(back, 1);
    while (torn < 300) {
        cuMemAlloc_v2(&p, 1 << 20);
        cuMemFree_v2(p);
        for (volatile int i = 0; i < 5000; i++)
            ;
    }
    sigset_t alarm;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    sigprocmask(SIG_BLOCK, &alarm, 0);
    setitimer(ITIMER_REAL, &off, 0);
    for (int i = 0; i < 1000; i++) {
        cuMemAlloc_v2(&p, 3 << 20);
        cuMemFree_v2(p);
    }
    puts("1000 in peace");
    return 0;
}

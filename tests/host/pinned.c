/* Harm: the recorder ran on the one processor, and with the priority, that the thread had which made the first allocation.
 * Prints nothing; the recorder's state is in the file that is named. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

int main(void)
{
    cpu_set_t all, one;
    address p;
    struct sched_param real_time = { 10 }, usual = { 0 };
    sched_getaffinity(0, sizeof all, &all);
    CPU_ZERO(&one);
    for (int i = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &all)) {
            CPU_SET(i, &one);
            break;
        }
    sched_setaffinity(0, sizeof one, &one);
    int is_real_time = sched_setscheduler(0, SCHED_FIFO, &real_time) == 0;
    cuInit(0);
    cuMemAlloc_v2(&p, 1 << 20);
    if (is_real_time)
        sched_setscheduler(0, SCHED_OTHER, &usual);
    sched_setaffinity(0, sizeof all, &all);
    /* The test looks at the recorder meanwhile. */
    char end;
    puts("recorded");
    fflush(stdout);
    return read(0, &end, 1) < 0;
}

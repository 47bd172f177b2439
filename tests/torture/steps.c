/* A preload under which the clock steps: every call of it is a day away from the one before, in either direction, as when a machine's time is
 * set, or libfaketime is used. */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long step(void)
{
    static long count;
    return (__atomic_add_fetch(&count, 1, __ATOMIC_RELAXED) % 5 - 2) * 86400;
}
int clock_gettime(clockid_t clock, struct timespec *to)
{
    int result = (int)syscall(SYS_clock_gettime, clock, to);
    if (result == 0 && clock != CLOCK_PROCESS_CPUTIME_ID && clock != CLOCK_THREAD_CPUTIME_ID) to->tv_sec += step() + 10 * 86400;
    return result;
}
int gettimeofday(struct timeval *restrict to, void *restrict zone)
{
    int result = (int)syscall(SYS_gettimeofday, to, zone);
    if (result == 0) to->tv_sec += step();
    return result;
}
time_t time(time_t *to)
{
    struct timeval now;
    gettimeofday(&now, NULL);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}

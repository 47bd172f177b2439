/* COUNT threads that are all alive, meet, allocate at once, idle, and allocate again: `crowd COUNT CALLS
 * [PAUSE_US [CALLS_AT_ONCE]]` */
#include "torture.h"

static pthread_barrier_t barrier;
static long calls, pause_us, at_once;
static void *thread(void *unused)
{
    long failed = 0;
    (void)unused;
    pthread_barrier_wait(&barrier);
    failed += work(at_once);
    pthread_barrier_wait(&barrier);
    for (long i = 0; i < calls; i++) {
        failed += work(1);
        if (pause_us) rest(pause_us);
    }
    pthread_barrier_wait(&barrier);
    return (void *)failed;
}

int main(int argc, char **argv)
{
    long count = argc > 1 ? atol(argv[1]) : 10, failed = 0;
    calls = argc > 2 ? atol(argv[2]) : 10;
    pause_us = argc > 3 ? atol(argv[3]) : 0;
    at_once = argc > 4 ? atol(argv[4]) : calls;
    begin();
    pthread_barrier_init(&barrier, NULL, (unsigned)count);
    void **threads = calloc((size_t)count, sizeof *threads);
    for (long i = 0; i < count; i++) threads[i] = thread_of(thread, NULL, 1 << 16);
    for (long i = 0; i < count; i++) failed += (long)join(threads[i]);
    printf("%ld threads, %ld failed\n", count, failed);
    return 0;
}

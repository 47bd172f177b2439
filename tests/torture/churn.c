/* Threads that come and go: `churn COUNT ALIVE CALLS`: COUNT in all, ALIVE at a time, each with CALLS requests. */
#include "torture.h"

static long calls;
static void *thread(void *unused)
{
    (void)unused;
    return (void *)work(calls);
}

int main(int argc, char **argv)
{
    long count = argc > 1 ? atol(argv[1]) : 100, alive = argc > 2 ? atol(argv[2]) : 2, failed = 0;
    calls = argc > 3 ? atol(argv[3]) : 1;
    begin();
    work(1);
    void **threads = calloc((size_t)alive, sizeof *threads);
    for (long i = 0; i < count; i++) {
        if (threads[i % alive]) failed += (long)join(threads[i % alive]);
        threads[i % alive] = thread_of(thread, NULL, 1 << 16);
    }
    for (long i = 0; i < alive; i++)
        if (threads[i]) failed += (long)join(threads[i]);
    printf("%ld threads, %ld failed\n", count, failed);
    return 0;
}

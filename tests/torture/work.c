/* Threads that ask for memory and give it back: what stands in most surroundings. `work THREADS CALLS [PAUSE_US]`; 0 calls: until it is
 * killed. */
#include "torture.h"

static long calls, pause_us;
static void *thread(void *unused)
{
    (void)unused;
    long failed = 0;
    for (long i = 0; calls == 0 || i < calls; i += 10) {
        failed += work(calls ? (calls - i < 10 ? calls - i : 10) : 10);
        if (pause_us) rest(pause_us);
    }
    return (void *)failed;
}

int main(int argc, char **argv)
{
    int n = argc > 1 ? atoi(argv[1]) : 1;
    calls = argc > 2 ? atol(argv[2]) : 100;
    pause_us = argc > 3 ? atol(argv[3]) : 0;
    begin();
    void *threads[n];
    long failed = 0;
    for (int i = 1; i < n; i++) threads[i] = start(thread, NULL);
    failed += (long)thread(NULL);
    for (int i = 1; i < n; i++) failed += (long)join(threads[i]);
    printf("%d threads, %ld calls, %ld failed\n", n, calls, failed);
    return 0;
}

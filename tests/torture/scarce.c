/* An address space that is full when threads begin, and has room again later: `scarce THREADS`. What is lost in between is shown, and then
 * it goes on. */
#include "torture.h"
#include <sys/resource.h>

static pthread_barrier_t barrier;
static void *thread(void *unused)
{
    (void)unused;
    long failed = 0;
    for (int turn = 0; turn < 3; turn++) {
        pthread_barrier_wait(&barrier);
        failed += work(20);
        pthread_barrier_wait(&barrier);
    }
    return (void *)failed;
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 10;
    struct rlimit had, least;
    begin();
    long failed = work(10);
    pthread_barrier_init(&barrier, NULL, (unsigned)count + 1);
    void *threads[count];
    for (int i = 0; i < count; i++) threads[i] = thread_of(thread, NULL, 1 << 16);
    getrlimit(RLIMIT_AS, &had);
    for (int turn = 0; turn < 3; turn++) {
        least = had;
        if (turn == 0) least.rlim_cur = 1 << 20;
        setrlimit(RLIMIT_AS, &least);
        pthread_barrier_wait(&barrier);
        pthread_barrier_wait(&barrier);
        setrlimit(RLIMIT_AS, &had);
    }
    for (int i = 0; i < count; i++) failed += (long)join(threads[i]);
    printf("%d threads, %ld failed\n", count, failed);
    return 0;
}

/* Harm: threads that record an event now and then kept a chunk of the ring each, so that a small ring was full though
 * nothing was in it. 100 threads make an allocation each, in turn, three
 * times. */
#include <pthread.h>
#include <stdio.h>
#include <time.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

static pthread_barrier_t turn;
static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;

static void *work(void *unused)
{
    address p;
    for (int i = 0; i < 3; i++) {
        pthread_barrier_wait(&turn);
        pthread_mutex_lock(&one);
        struct timespec pause = { 0, 10000000 };
        cuMemAlloc_v2(&p, 1 << 20);
        nanosleep(&pause, 0);
        pthread_mutex_unlock(&one);
    }
    return unused;
}

int main(void)
{
    pthread_t threads[100];
    cuInit(0);
    pthread_barrier_init(&turn, 0, 100);
    for (int i = 0; i < 100; i++)
        pthread_create(&threads[i], 0, work, 0);
    for (int i = 0; i < 100; i++)
        pthread_join(threads[i], 0);
    puts("done");
    return 0;
}

/* Harm: a ring that begins with little memory had no chunk for each of many threads that come at once, before its recorder
 * gave it more. 900 threads live at the same time and make an allocation each. */
#include <pthread.h>
#include <stdio.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

static pthread_barrier_t together;

static void *work(void *unused)
{
    address p;
    cuMemAlloc_v2(&p, 1 << 20);
    pthread_barrier_wait(&together);
    return unused;
}

int main(void)
{
    static pthread_t threads[900];
    address p;
    cuInit(0);
    cuMemAlloc_v2(&p, 1 << 20);
    pthread_barrier_init(&together, 0, 900);
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, 128 << 10);
    for (int i = 0; i < 900; i++)
        if (pthread_create(&threads[i], &small, work, 0))
            return 1;
    for (int i = 0; i < 900; i++)
        pthread_join(threads[i], 0);
    puts("done");
    return 0;
}

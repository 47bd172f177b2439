/* A sanitizer's runtime stands in for hundreds of functions of the C library, asks for the real ones with dlsym before it is
 * ready itself, and so finds whoever calls one of them from there. Threads that allocate; built with -fsanitize. */
#include <pthread.h>
#include <stdio.h>

typedef unsigned long long address;
int cuMemAlloc_v2(address *at, size_t bytes);
int cuMemFree_v2(address at);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int pairs;

static void *work(void *unused)
{
    for (int i = 0; i < 25; i++) {
        address at;
        if (cuMemAlloc_v2(&at, 4096) || cuMemFree_v2(at))
            return unused;
        pthread_mutex_lock(&lock);
        pairs++;
        pthread_mutex_unlock(&lock);
    }
    return unused;
}

int main(void)
{
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], 0, work, 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], 0);
    printf("%d pairs\n", pairs);
    return 0;
}

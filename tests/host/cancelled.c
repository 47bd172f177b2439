/* Harm: making the session was a cancellation point: a thread that was being cancelled died in it, and every driver call
 * of all other threads took a second from then on. Says how the thread ended and where; with `asynchronous` the
 * request may act at any instruction. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);
int cuMemFree_v2(address);

static volatile int came_back;

static void *first(void *unused)
{
    address p;
    pthread_cancel(pthread_self());
    cuMemAlloc_v2(&p, 1 << 20);
    came_back = 1;
    pthread_testcancel();
    return unused;
}

static void *endless(void *unused)
{
    address p;
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, 0);
    for (;;) {
        cuMemAlloc_v2(&p, 1 << 20);
        cuMemFree_v2(p);
    }
    return unused;
}

int main(int argc, char **argv)
{
    pthread_t thread;
    void *result;
    address p;
    cuInit(0);
    if (argc > 1 && !strcmp(argv[1], "asynchronous")) {
        for (int i = 0; i < 100; i++) {
            pthread_create(&thread, 0, endless, 0);
            struct timespec pause = { 0, 50000L * (i % 7) };
            nanosleep(&pause, 0);
            pthread_cancel(thread);
            pthread_join(thread, &result);
            if (result != PTHREAD_CANCELED)
                return 1;
        }
    } else {
        pthread_create(&thread, 0, first, 0);
        pthread_join(thread, &result);
        printf("cancelled %d, came back %d\n", result == PTHREAD_CANCELED, came_back);
    }
    for (int i = 0; i < 50; i++) {
        cuMemAlloc_v2(&p, 3 << 20);
        cuMemFree_v2(p);
    }
    puts("done");
    return 0;
}

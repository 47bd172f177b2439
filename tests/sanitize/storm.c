/* Everything that the library does with more than one thread, at once and in a small ring: threads that come and go and
 * take over what others left, a ring that runs full, forks in the middle, memory that
 * is given back by another thread than took it. What a sanitizer finds in it is a fault of the library: the program
 * itself shares nothing but a table of atomics. */
#define _GNU_SOURCE
#include "../programs/api.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SLOTS = 64, THREADS = 8 };
static _Atomic CUdeviceptr table[SLOTS];
static _Atomic int failures;
static int rounds = 100;
static pthread_barrier_t begun;
static void *context;

static void swap(unsigned slot, CUdeviceptr with)
{
    CUdeviceptr before = atomic_exchange(&table[slot % SLOTS], with);
    if (before && cuMemFree_v2(before) != 0) failures++;
}

static void *work(void *number)
{
    unsigned state = (unsigned)(size_t)number * 2654435761u + 1;
    /* All of a generation have their lines before one of them ends: a sanitizer cannot know that a thread is gone because
     * the kernel says so, but it knows that this generation was joined before the next one was made. */
    void *first;
    if (cuCtxSetCurrent(context) != 0) failures++;
    if (cuMemHostAlloc(&first, 64, 0) != 0 || cuMemFreeHost(first) != 0) failures++;
    pthread_barrier_wait(&begun);
    for (int i = 0; i < rounds; i++) {
        state = state * 1664525u + 1013904223u;
        CUdeviceptr at = 0;
        switch (state >> 29) {
        case 0: {
            void *host;
            if (cuMemHostAlloc(&host, 4096, 0) != 0 || cuMemFreeHost(host) != 0) failures++;
            break;
        }
        case 1:
            swap(state >> 8, 0);
            break;
        default:
            if (cuMemAlloc_v2(&at, 512 + (state >> 16)) != 0) failures++;
            swap(state >> 8, at);
        }
    }
    return NULL;
}

int main(void)
{
    CHECK(cuInit(0) == 0 && cuCtxCreate_v2(&context, 0, 0) == 0);
    pthread_barrier_init(&begun, NULL, THREADS);
    for (int generation = 0; generation < 12; generation++) {
        pthread_t threads[THREADS];
        for (size_t i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, work, (void *)(generation * THREADS + i)) == 0);
        pid_t child = 0;
        if (generation % 5 == 2 && (child = fork()) == 0) {
            CUdeviceptr at;
            _exit(cuMemAlloc_v2(&at, 4096) == 0 ? 7 : 8);
        }
        if (child) {
            int status;
            CHECK(waitpid(child, &status, 0) == child);
        }
        for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    }
    for (unsigned slot = 0; slot < SLOTS; slot++) swap(slot, 0);
    printf("%d calls failed\n", atomic_load(&failures));
    return failures != 0;
}

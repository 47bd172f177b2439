/* Everything that the library does with more than one thread, at once and in a small ring: threads that come and go and
 * take over what others left, a ring that runs full, nested events in signal handlers, forks in the middle, memory that
 * is given back by another thread than took it. What a sanitizer finds in it is a fault of the library: the program
 * itself shares nothing but a table of atomics. */
#define _GNU_SOURCE
#include "../programs/api.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SLOTS = 64, THREADS = 8 };
static _Atomic CUdeviceptr table[SLOTS];
static _Atomic int failures;
static int rounds = 200;

static void swap(unsigned slot, CUdeviceptr with)
{
    CUdeviceptr before = atomic_exchange(&table[slot % SLOTS], with);
    if (before && cuMemFree_v2(before) != 0) failures++;
}

static void *work(void *number)
{
    unsigned state = (unsigned)(size_t)number * 2654435761u + 1;
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

static void on_tick(int signal)
{
    CUdeviceptr at;
    (void)signal;
    if (cuMemAlloc_v2(&at, 700) == 0) cuMemFree_v2(at);
}

int main(int argc, char **argv)
{
    int ticks = argc > 1 && argv[1][0] == 't';
    void *context;
    CHECK(cuInit(0) == 0 && cuCtxCreate_v2(&context, 0, 0) == 0);
    if (ticks) {
        struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART};
        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &(struct itimerval){{0, 2000}, {0, 2000}}, NULL);
    }
    for (int generation = 0; generation < 30; generation++) {
        pthread_t threads[THREADS];
        for (size_t i = 0; i < THREADS; i++)
            CHECK(pthread_create(&threads[i], NULL, work, (void *)(generation * THREADS + i)) == 0);
        pid_t child = 0;
        if (!ticks && generation % 10 == 5 && (child = fork()) == 0) {
            CUdeviceptr at;
            _exit(cuMemAlloc_v2(&at, 4096) == 0 ? 7 : 8);
        }
        if (child) {
            int status;
            CHECK(waitpid(child, &status, 0) == child);
        }
        for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    }
    if (ticks) setitimer(ITIMER_REAL, &(struct itimerval){{0, 0}, {0, 0}}, NULL);
    for (unsigned slot = 0; slot < SLOTS; slot++) swap(slot, 0);
    printf("%d calls failed\n", atomic_load(&failures));
    return failures != 0;
}

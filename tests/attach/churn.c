/* Runs until its standard input ends: threads (6, or as many as its argument says) that allocate, free and map, each with books of its
 * own, and what it held before (KEPT allocations of 1 MiB). Each byte on its input is answered by the longest round since the last, in
 * microseconds. Says at its end how often it went round. Exits with 1 if a call failed or an address was given out twice. */
#include "../programs/api.h"

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

enum { KEPT = 50, MOST_THREADS = 64, HELD = 8 };
static atomic_int stop;
static atomic_long rounds, longest;
static void *context;

static long now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1000000000L + at.tv_nsec;
}

static void map_once(void)
{
    CUmemAllocationProp where = {.type = 1, .location = {1, 0}};
    CUmemAccessDesc access = {{1, 0}, 3};
    CUdeviceptr at;
    CUhandle memory;
    OK(cuMemAddressReserve(&at, 4 << 20, 0, 0, 0));
    OK(cuMemCreate(&memory, 2 << 20, &where, 0));
    OK(cuMemMap(at, 2 << 20, 0, memory, 0));
    OK(cuMemSetAccess(at, 2 << 20, &access, 1));
    OK(cuMemRelease(memory));
    OK(cuMemUnmap(at, 2 << 20));
    OK(cuMemAddressFree(at, 4 << 20));
}

static void *work(void *number)
{
    CUdeviceptr held[HELD] = {0};
    OK(cuCtxSetCurrent(context));
    for (size_t i = 0; !stop; i++) {
        long began = now();
        CUdeviceptr *slot = &held[i % HELD];
        if (*slot) OK(cuMemFree_v2(*slot));
        OK(cuMemAlloc_v2(slot, 4096 * (1 + (size_t)number)));
        for (int other = 0; other < HELD; other++) CHECK(&held[other] == slot || held[other] != *slot);
        if (i % 16 == 0) map_once();
        long took = now() - began, most = longest;
        while (took > most && !atomic_compare_exchange_weak(&longest, &most, took)) {}
        rounds++;
        if (i % 64 == 0) usleep(200);
    }
    for (int i = 0; i < HELD; i++) if (held[i]) OK(cuMemFree_v2(held[i]));
    return NULL;
}

int main(int argc, char **argv)
{
    size_t n_threads = argc > 1 ? (size_t)atoi(argv[1]) : 6;
    pthread_t threads[MOST_THREADS];
    CUdeviceptr kept[KEPT];
    char byte;
    CHECK(n_threads <= MOST_THREADS);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    for (int i = 0; i < KEPT; i++) OK(cuMemAlloc_v2(&kept[i], 1 << 20));
    for (size_t i = 0; i < n_threads; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    printf("ready\n");
    fflush(stdout);
    while (read(0, &byte, 1) == 1) {
        printf("%ld\n", atomic_exchange(&longest, 0) / 1000);
        fflush(stdout);
    }
    stop = 1;
    for (size_t i = 0; i < n_threads; i++) pthread_join(threads[i], NULL);
    for (int i = 0; i < KEPT; i++) OK(cuMemFree_v2(kept[i]));
    printf("%ld rounds\n", (long)rounds);
    return 0;
}

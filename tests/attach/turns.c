/* Computes turn after turn until a file `stop` appears, and writes a number and the milliseconds of each. The number follows from what the
 * turn asked for and from how every call answered; memory that is given out twice ends it with status 1.
 *
 *   as it is: the driver's functions, linked; -DRUNTIME: those of a CUDA runtime; -DTHREADS=N: so many threads come and go each turn
 *   -DNCCL: a rank of a job; all ranks end with the same turn
 *   -DLIBRARY: `unsigned long turn(unsigned)` for ctypes */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CHECK(yes) do { if (!(yes)) { fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #yes); _exit(1); } } while (0)
#ifndef THREADS
#define THREADS 1
#endif
enum { HELD = 16, STEPS = 60 };
typedef unsigned long long Address;

#ifdef RUNTIME
int cudaMalloc(Address *, size_t), cudaFree(Address), cudaHostAlloc(Address *, size_t, unsigned), cudaFreeHost(Address), cudaSetDevice(int);
static void begin(void) { CHECK(cudaSetDevice(0) == 0 && cudaFree(0) == 0); }
static void enter(void) { CHECK(cudaSetDevice(0) == 0); }
static int give(Address *at, size_t bytes, int on_host) { return on_host ? cudaHostAlloc(at, bytes, 0) : cudaMalloc(at, bytes); }
static int take(Address at, int on_host) { return on_host ? cudaFreeHost(at) : cudaFree(at); }
#else
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int cuMemAlloc_v2(Address *, size_t), cuMemFree_v2(Address), cuMemHostAlloc(Address *, size_t, unsigned), cuMemFreeHost(Address);
static void *context;
static void enter(void) { CHECK(cuCtxSetCurrent(context) == 0); }
static void begin(void) { CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0); enter(); }
static int give(Address *at, size_t bytes, int on_host) { return on_host ? cuMemHostAlloc(at, bytes, 0) : cuMemAlloc_v2(at, bytes); }
static int take(Address at, int on_host) { return on_host ? cuMemFreeHost(at) : cuMemFree_v2(at); }
#endif

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e3 + at.tv_nsec / 1e6;
}

static unsigned long compute(unsigned seed)
{
    struct { Address at; int on_host; } held[HELD] = {{0, 0}};
    unsigned long sum = seed;
    uint64_t state = seed + 1;
    enter();
    for (int n = 0; n < STEPS; n++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        int which = state >> 33 & (HELD - 1), on_host = (state >> 40 & 7) == 0;
        size_t bytes = (state >> 45 & 0xfff) * 512 + 512;
        if (held[which].at) CHECK(take(held[which].at, held[which].on_host) == 0);
        CHECK(give(&held[which].at, bytes, on_host) == 0 && held[which].at);
        held[which].on_host = on_host;
        for (int other = 0; other < HELD; other++) CHECK(other == which || held[other].at != held[which].at);
        sum = sum * 1000003 + bytes;
    }
    for (int n = 0; n < HELD; n++) if (held[n].at) CHECK(take(held[n].at, held[n].on_host) == 0);
    return sum;
}

static struct { unsigned seed; unsigned long sum; } jobs[THREADS];

static void *run(void *job)
{
    jobs[(intptr_t)job].sum = compute(jobs[(intptr_t)job].seed);
    return NULL;
}

unsigned long turn(unsigned number)
{
    static int has_begun;
    pthread_t threads[THREADS];
    unsigned long sum = 0;
    if (!has_begun) begin(), has_begun = 1;
    for (intptr_t n = 0; n < THREADS; n++) {
        jobs[n].seed = number * THREADS + (unsigned)n;
        if (THREADS == 1) run((void *)n);
        else CHECK(pthread_create(&threads[n], NULL, run, (void *)n) == 0);
    }
    for (int n = 0; n < THREADS; n++) {
        if (THREADS > 1) CHECK(pthread_join(threads[n], NULL) == 0);
        sum = sum * 31 + jobs[n].sum;
    }
    return sum;
}

#ifdef NCCL
typedef struct { char bytes[128]; } Id;
int ncclCommInitRank(void **, int, Id, int), ncclGroupStart(void), ncclGroupEnd(void);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *), ncclSend(const void *, size_t, int, int, void *, void *);
int ncclRecv(void *, size_t, int, int, void *, void *), ncclCommSplit(void *, int, int, void **, void *), ncclCommDestroy(void *);
int cuStreamSynchronize(void *);

static int ends(unsigned number, int rank)
{
    /* All ranks read it before the turn that it names: a turn ends when all have made its calls. */
    static long last = -1;
    if (rank == 0 && last < 0 && access("stop", F_OK) == 0) {
        FILE *file = fopen("last.new", "w");
        CHECK(file);
        fprintf(file, "%ld", last = number + 2L);
        CHECK(fclose(file) == 0 && rename("last.new", "last") == 0);
    }
    FILE *file = last < 0 ? fopen("last", "r") : NULL;
    if (file) { CHECK(fscanf(file, "%ld", &last) == 1); fclose(file); }
    return last >= 0 && number >= last;
}

int main(void)
{
    int rank = atoi(getenv("RANK")), ranks = atoi(getenv("WORLD_SIZE"));
    void *world, *part;
    Address from, to;
    Id id = {"world"};
    begin();
    CHECK(give(&from, 1 << 20, 0) == 0 && give(&to, 1 << 20, 0) == 0 && ncclCommInitRank(&world, ranks, id, rank) == 0);
    for (unsigned number = 0; !ends(number, rank); number++) {
        double began = now();
        unsigned long sum = turn(number);
        CHECK(ncclAllReduce((void *)from, (void *)to, 1 << 16, 7, 0, world, NULL) == 0);
        CHECK(ncclGroupStart() == 0 && ncclSend((void *)from, 1 << 10, 7, (rank + 1) % ranks, world, NULL) == 0);
        CHECK(ncclRecv((void *)to, 1 << 10, 7, (rank + ranks - 1) % ranks, world, NULL) == 0 && ncclGroupEnd() == 0);
        if (number % 16 == 0) {
            CHECK(ncclCommSplit(world, rank % 2, rank, &part, NULL) == 0);
            CHECK(ncclAllReduce((void *)from, (void *)to, 1 << 12, 7, 0, part, NULL) == 0 && ncclCommDestroy(part) == 0);
        }
        CHECK(cuStreamSynchronize(NULL) == 0);
        printf("%lx %.3f\n", sum, now() - began);
        fflush(stdout);
    }
    CHECK(ncclCommDestroy(world) == 0);
    return 0;
}
#elif !defined LIBRARY
int main(void)
{
    for (unsigned number = 0; access("stop", F_OK); number++) {
        double began = now();
        unsigned long sum = turn(number);
        printf("%lx %.3f\n", sum, now() - began);
        fflush(stdout);
    }
    return 0;
}
#endif

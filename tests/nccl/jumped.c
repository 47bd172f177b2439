/* Calls into NCCL that nobody comes back from: jumped out of by whom NCCL calls back, 100 times on one thread; by a thread
 * that ends in one, and by one that is cancelled in one. Then 10 calls, and an allocation of 3 MiB that is none of NCCL's.
 *
 * With -DLIBRARY it is the NCCL, which calls back for each collective. */
#include <stddef.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef void *Comm;

#ifdef LIBRARY

static int made;
void (*nccl_calls_back)(void);
int ncclGetVersion(int *out) { return *out = 22809, 0; }
int ncclGetUniqueId(ncclUniqueId *out) { return *out = (ncclUniqueId){ "made here" }, 0; }
int ncclCommInitRank(Comm *out, int ranks, ncclUniqueId id, int rank) { return *out = &made, 0 * (ranks + rank + id.internal[0]); }
int ncclCommCount(Comm comm, int *out) { return *out = 1, comm != &made; }
int ncclCommUserRank(Comm comm, int *out) { return *out = 0, comm != &made; }
int ncclAllReduce(const void *send, void *receive, size_t count, int type, int op, Comm comm, void *stream)
{
    if (nccl_calls_back) nccl_calls_back();
    return !send + !receive + !count + 0 * type + 0 * op + (comm != &made) + !!stream;
}

#else

#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <unistd.h>

int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *), cuMemAlloc_v2(unsigned long long *, size_t);
int ncclGetUniqueId(ncclUniqueId *), ncclCommInitRank(Comm *, int, ncclUniqueId, int);
int ncclAllReduce(const void *, void *, size_t, int, int, Comm, void *);
extern void (*nccl_calls_back)(void);

static char buffer[64];
static Comm comm;
static jmp_buf back;
static void jump(void) { longjmp(back, 1); }
static void end(void) { pthread_exit(NULL); }
static void wait_for_ever(void) { pause(); }

static void *reduce(void *failures)
{
    int result = ncclAllReduce(buffer, buffer, 16, 7, 0, comm, NULL);
    if (failures) *(int *)failures += result != 0;
    return NULL;
}

/* Further up and further down than the calls that are left. */
__attribute__((noinline)) static void *deeper(void *failures)
{
    volatile char room[20000];
    for (size_t i = 0; i < sizeof room; i++) room[i] = 1;
    reduce(failures);
    return (void *)(size_t)room[0];
}

int main(void)
{
    ncclUniqueId id;
    void *context;
    unsigned long long address;
    pthread_t thread;
    int failures = cuInit(0) + cuDevicePrimaryCtxRetain(&context, 0) + cuCtxSetCurrent(context);
    failures += ncclGetUniqueId(&id) + ncclCommInitRank(&comm, 1, id, 0);
    nccl_calls_back = end;
    pthread_create(&thread, NULL, reduce, NULL);
    pthread_join(thread, NULL);
    nccl_calls_back = wait_for_ever;
    pthread_create(&thread, NULL, reduce, NULL);
    pthread_cancel(thread);
    pthread_join(thread, NULL);
    nccl_calls_back = jump;
    for (volatile int i = 0; i < 100; i++)
        if (setjmp(back) == 0) (i % 2 ? reduce : deeper)(NULL);
    nccl_calls_back = NULL;
    failures += cuMemAlloc_v2(&address, 3 << 20);
    for (int i = 0; i < 10; i++) (i % 2 ? deeper : reduce)(&failures);
    printf("%d failures\n", failures);
    return failures != 0;
}

#endif

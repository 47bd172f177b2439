/* Every function of NCCL that is a row, once: linked (default), found by dlsym on the library's handle (-DBY_HANDLE), or by the other
 * name (-DPROFILED). */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int opCnt, peer, sigIdx, ctx; } ncclWaitSignalDesc_t;
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min, max;
    const char *net;
    int share, traffic;
    const char *name;
} ncclConfig_t;
typedef void *Comm;
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
void fakeNcclBreak(Comm, int);

#define S const void *, void *, size_t, int
#define FUNCTIONS(F)                                                                                         \
    F(CommInitRank, (Comm *, int, ncclUniqueId, int))                                                        \
    F(CommInitRankConfig, (Comm *, int, ncclUniqueId, int, ncclConfig_t *))                                  \
    F(CommInitRankScalable, (Comm *, int, int, int, ncclUniqueId *, ncclConfig_t *))                         \
    F(CommInitAll, (Comm *, int, const int *))                                                               \
    F(CommSplit, (Comm, int, int, Comm *, ncclConfig_t *))                                                   \
    F(CommShrink, (Comm, int *, int, Comm *, ncclConfig_t *, int))                                           \
    F(CommGrow, (Comm, int, const ncclUniqueId *, int, Comm *, ncclConfig_t *))                              \
    F(GetUniqueId, (ncclUniqueId *))                                                                         \
    F(CommGetUniqueId, (Comm, ncclUniqueId *))                                                               \
    F(CommFinalize, (Comm)) F(CommDestroy, (Comm)) F(CommAbort, (Comm)) F(CommRevoke, (Comm, int))           \
    F(CommSuspend, (Comm, int)) F(CommResume, (Comm)) F(CommGetAsyncError, (Comm, int *))                    \
    F(AllReduce, (S, int, Comm, void *)) F(AllReduceConfig, (S, int, Comm, void *, const void *))            \
    F(Broadcast, (S, int, Comm, void *)) F(BroadcastConfig, (S, int, Comm, void *, const void *))            \
    F(Bcast, (void *, size_t, int, int, Comm, void *))                                                       \
    F(Reduce, (S, int, int, Comm, void *)) F(ReduceConfig, (S, int, int, Comm, void *, const void *))        \
    F(AllGather, (S, Comm, void *)) F(AllGatherConfig, (S, Comm, void *, const void *))                      \
    F(ReduceScatter, (S, int, Comm, void *)) F(ReduceScatterConfig, (S, int, Comm, void *, const void *))    \
    F(AlltoAll, (S, Comm, void *)) F(AlltoAllConfig, (S, Comm, void *, const void *))                        \
    F(Gather, (S, int, Comm, void *)) F(GatherConfig, (S, int, Comm, void *, const void *))                  \
    F(Scatter, (S, int, Comm, void *)) F(ScatterConfig, (S, int, Comm, void *, const void *))                \
    F(Send, (const void *, size_t, int, int, Comm, void *)) F(Recv, (void *, size_t, int, int, Comm, void *)) \
    F(PutSignal, (const void *, size_t, int, int, void *, size_t, int, int, unsigned, Comm, void *))         \
    F(Signal, (int, int, int, unsigned, Comm, void *))                                                       \
    F(WaitSignal, (int, ncclWaitSignalDesc_t *, Comm, void *))                                               \
    F(GroupStart, (void)) F(GroupEnd, (void)) F(GroupSimulateEnd, (void *))                                  \
    F(MemAlloc, (void **, size_t)) F(MemFree, (void *))                                                      \
    F(CommRegister, (Comm, void *, size_t, void **)) F(CommDeregister, (Comm, void *))                       \
    F(CommWindowRegister, (Comm, void *, size_t, void **, int)) F(CommWindowDeregister, (Comm, void *))      \
    F(DevCommCreate, (Comm, const void *, void *)) F(DevCommDestroy, (Comm, const void *))                   \
    F(RedOpCreatePreMulSum, (int *, void *, int, int, Comm)) F(RedOpDestroy, (int, Comm))

#define DECLARE(name, parameters) int nccl##name parameters; int pnccl##name parameters;
FUNCTIONS(DECLARE)
#define POINTER(name, parameters) static int(*name) parameters;
FUNCTIONS(POINTER)

#define CHECK(call, wanted)                                                                                  \
    do {                                                                                                     \
        int result = (call);                                                                                 \
        if (result != (wanted)) {                                                                            \
            fprintf(stderr, "%s:%d: %s is %d\n", __FILE__, __LINE__, #call, result);                         \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)
#define OK(call) CHECK(call, 0)

int main(void)
{
#ifdef BY_HANDLE
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
#define FIND(name, parameters) name = (int(*) parameters)dlsym(library, "nccl" #name);
#elif defined PROFILED
#define FIND(name, parameters) name = pnccl##name;
#else
#define FIND(name, parameters) name = nccl##name;
#endif
    FUNCTIONS(FIND)
    enum { FLOAT = 7, SUM = 0 };
    void *context, *memory, *handle, *window, *a = (void *)0x1000, *b = (void *)0x2000, *stream = (void *)0x77;
    Comm comm, configured, scalable, all[2], child, shrunk, grown, none;
    ncclUniqueId id;
    int op, error, excluded = 0;
    ncclConfig_t config = {sizeof config, 0xcafebeef, 22700, 1, -2147483647 - 1, 4, 8, NULL, 1, 3, "tensor parallel"};
    ncclConfig_t old = {24, 0xcafebeef, 21400, 1, 99, 99, 99, (void *)99, 99, 99, (void *)99}; /* nothing behind 24 bytes is to be read */
    ncclWaitSignalDesc_t signals[2] = {{2, 1, 5, 6}, {1, 0, 0, 0}};
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));

    OK(GetUniqueId(&id));
    OK(CommInitRank(&comm, 4, id, 1));
    OK(CommInitRankConfig(&configured, 2, id, 0, &config));
    OK(CommInitRankScalable(&scalable, 2, 1, 1, &id, &old));
    OK(CommInitAll(all, 1, NULL));
    OK(CommSplit(comm, 3, 9, &child, NULL));
    OK(CommSplit(comm, -1, 0, &none, NULL));
    OK(CommShrink(comm, &excluded, 1, &shrunk, NULL, 0));
    OK(CommGetUniqueId(comm, &id));
    OK(CommGrow(comm, 6, &id, -1, &grown, NULL));

    OK(AllReduce(a, b, 1, FLOAT, SUM, comm, stream));
    OK(AllReduceConfig(a, b, 2, FLOAT, SUM, comm, stream, NULL));
    OK(Broadcast(a, b, 3, FLOAT, 2, comm, stream));
    OK(BroadcastConfig(a, b, 4, FLOAT, 2, comm, stream, NULL));
    OK(Bcast(a, 5, FLOAT, 2, comm, stream));
    OK(Reduce(a, b, 6, FLOAT, SUM, 3, comm, stream));
    OK(ReduceConfig(a, b, 7, FLOAT, SUM, 3, comm, stream, NULL));
    OK(AllGather(a, b, 8, FLOAT, comm, stream));
    OK(AllGatherConfig(a, b, 9, FLOAT, comm, stream, NULL));
    OK(ReduceScatter(a, b, 10, FLOAT, SUM, comm, stream));
    OK(ReduceScatterConfig(a, b, 11, FLOAT, SUM, comm, stream, NULL));
    OK(AlltoAll(a, b, 12, FLOAT, comm, stream));
    OK(AlltoAllConfig(a, b, 13, FLOAT, comm, stream, NULL));
    OK(Gather(a, b, 14, FLOAT, 0, comm, stream));
    OK(GatherConfig(a, b, 15, FLOAT, 0, comm, stream, NULL));
    OK(Scatter(a, b, 16, FLOAT, 0, comm, stream));
    OK(ScatterConfig(a, b, 17, FLOAT, 0, comm, stream, NULL));
    CHECK(AllReduce(NULL, b, 1, FLOAT, SUM, comm, stream), 4); /* gives its number back */
    OK(AllReduce(a, b, 18, FLOAT, SUM, child, stream));

    OK(GroupStart());
    OK(Send(a, 19, FLOAT, 2, comm, stream));
    OK(GroupStart());
    OK(Recv(b, 20, FLOAT, 2, comm, stream));
    OK(GroupEnd());
    OK(Send(a, 21, FLOAT, 0, comm, stream));
    OK(Send(a, 22, FLOAT, 2, comm, stream));
    OK(GroupEnd());
    OK(GroupStart());
    OK(AllReduce(a, b, 23, FLOAT, SUM, comm, stream));
    OK(Send(a, 24, FLOAT, 2, comm, stream));
    OK(GroupSimulateEnd(NULL)); /* both numbers are free again */
    OK(Send(a, 25, FLOAT, 2, comm, stream));

    OK(RedOpCreatePreMulSum(&op, a, FLOAT, 1, comm));
    OK(AllReduce(a, b, 26, FLOAT, op, comm, stream));
    OK(RedOpDestroy(op, comm));
    OK(MemAlloc(&memory, 4 << 20));
    OK(CommRegister(comm, memory, 100, &handle));
    OK(CommWindowRegister(comm, memory, 200, &window, 1));
    OK(PutSignal(a, 27, FLOAT, 2, window, 64, 5, 6, 0, comm, stream));
    OK(Signal(2, 5, 6, 0, comm, stream));
    OK(WaitSignal(2, signals, comm, stream));
    OK(CommWindowDeregister(comm, window));
    OK(CommDeregister(comm, handle));
    OK(MemFree(memory));
    OK(DevCommCreate(comm, a, b));
    OK(DevCommDestroy(comm, b));
    OK(CommSuspend(comm, 1));
    OK(CommResume(comm));
    OK(CommGetAsyncError(comm, &error));
    fakeNcclBreak(comm, 6);
    for (int i = 0; i < 3; i++) OK(CommGetAsyncError(comm, &error)); /* one of them is news */
    fakeNcclBreak(comm, 0);
    OK(CommRevoke(child, 0));
    OK(CommFinalize(comm));
    OK(CommAbort(child));
    OK(CommDestroy(grown));
    OK(CommDestroy(shrunk));
    OK(CommDestroy(all[0]));
    OK(CommDestroy(scalable));
    OK(CommDestroy(configured));
    OK(CommDestroy(comm));
    return 0;
}

//! One rank's NCCL calls: communicators, collectives in and out of groups, and the memory that NCCL takes for itself.
//# Link: nccl
//# Env: FAKE_NCCL_INIT=16MiB
//# Env: FAKE_NCCL_FIRST=8MiB
//# Expect: cuMemAlloc_v2 4194304 freed
//# Expect: cuMemCreate 8388608 freed x5
//# Expect: cuMemCreate 4194304 freed
//# Expect: cuMemCreate 6291456 leaked
#include "api.h"

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, min, max; const char *net; int share; } ncclConfig_t;
int ncclGetVersion(int *), ncclGetUniqueId(ncclUniqueId *), ncclCommInitRank(void **, int, ncclUniqueId, int);
int ncclCommInitRankConfig(void **, int, ncclUniqueId, int, ncclConfig_t *), ncclCommSplit(void *, int, int, void **, ncclConfig_t *);
int ncclCommDestroy(void *), ncclCommCount(void *, int *), ncclCommUserRank(void *, int *), ncclCommCuDevice(void *, int *);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclAllGather(const void *, void *, size_t, int, void *, void *);
int ncclReduceScatter(const void *, void *, size_t, int, int, void *, void *);
int ncclBroadcast(const void *, void *, size_t, int, int, void *, void *), ncclBcast(void *, size_t, int, int, void *, void *);
int ncclReduce(const void *, void *, size_t, int, int, int, void *, void *);
int ncclSend(const void *, size_t, int, int, void *, void *), ncclRecv(void *, size_t, int, int, void *, void *);
int ncclGroupStart(void), ncclGroupEnd(void), ncclMemAlloc(void **, size_t), ncclMemFree(void *);
int pncclAllReduce(const void *, void *, size_t, int, int, void *, void *);

int main(void)
{
    enum { FLOAT = 7, SUM = 0 };
    ncclConfig_t config = {48, 0xcafebeef, 21800, 1, -1, -1, -1, NULL, -1};
    ncclUniqueId id;
    void *context, *comm, *second, *none, *kept;
    int version, count, rank, device;
    CUdeviceptr buffer;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc_v2(&buffer, 4 * MIB));
    void *p = (void *)(uintptr_t)buffer;

    OK(ncclGetVersion(&version));
    CHECK(version == 22809);
    OK(ncclGetUniqueId(&id));
    OK(ncclCommInitRank(&comm, 4, id, 1));
    OK(ncclCommCount(comm, &count));
    OK(ncclCommUserRank(comm, &rank));
    OK(ncclCommCuDevice(comm, &device));
    CHECK(count == 4 && rank == 1 && device == 0);
    OK(ncclAllReduce(p, p, 1 << 20, FLOAT, SUM, comm, NULL));
    OK(pncclAllReduce(p, p, 1 << 20, FLOAT, SUM, comm, NULL));
    OK(ncclAllGather(p, p, 1 << 18, FLOAT, comm, NULL));
    OK(ncclReduceScatter(p, p, 1 << 18, FLOAT, SUM, comm, NULL));
    OK(ncclBroadcast(p, p, 1 << 20, FLOAT, 0, comm, NULL));
    OK(ncclBcast(p, 1 << 20, FLOAT, 0, comm, NULL));
    OK(ncclReduce(p, p, 1 << 20, FLOAT, SUM, 0, comm, NULL));
    OK(ncclGroupStart());
    OK(ncclSend(p, 1 << 10, FLOAT, 2, comm, NULL));
    OK(ncclRecv(p, 1 << 10, FLOAT, 0, comm, NULL));
    OK(ncclGroupEnd());
    RETURNS(5, ncclGroupEnd());

    OK(ncclCommInitRankConfig(&second, 2, id, 0, &config));
    OK(ncclCommSplit(comm, -1, 0, &none, NULL));
    CHECK(none == NULL);
    OK(ncclCommDestroy(second)); /* never used: only what its start took */
    OK(ncclCommDestroy(comm));
    RETURNS(4, ncclAllReduce(p, p, 1, FLOAT, SUM, NULL, NULL));

    OK(ncclMemAlloc(&kept, 3 * MIB));
    OK(ncclMemFree(kept));
    OK(ncclMemAlloc(&kept, 6 * MIB)); /* forgotten */
    OK(cuMemFree_v2(buffer));
    return 0;
}

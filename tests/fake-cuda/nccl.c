/* libnccl.so.2: NCCL's exported boundary without communication, version 2.28.9.
 *
 * Calls succeed at once and move no data. What is real is the memory: like NCCL it allocates through cuMemCreate, at
 * initialisation partly from a thread of its own and again at a communicator's first collective, and frees at destroy.
 * `ncclX` is a weak name and `pncclX` a strong one of the same function, as in NCCL (core.h, NCCL_API).
 *
 *   FAKE_NCCL_INIT=64MiB     what a communicator takes at initialisation (default 64MiB)
 *   FAKE_NCCL_FIRST=32MiB    what it takes more at its first collective or send (default 32MiB) */
#define _GNU_SOURCE
#include "driver/usage.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
/* Defines pnccl##name and makes nccl##name a weak alias of it. */
#define API(type, name, parameters)                                                                          \
    EXPORT type pnccl##name parameters;                                                                      \
    EXPORT __attribute__((weak, alias("pnccl" #name))) type nccl##name parameters;                           \
    type pnccl##name parameters

enum { ncclSuccess = 0, ncclUnhandledCudaError = 1, ncclInternalError = 3, ncclInvalidArgument = 4, ncclInvalidUsage = 5 };
#define VERSION 22809

typedef int ncclResult_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking; } ncclConfig_t; /* the first fields of any version */
typedef void *cudaStream_t;

typedef unsigned long long handle_t;
struct allocation {
    struct allocation *next;
    handle_t handle;
    unsigned long long base;
    size_t bytes;
};
typedef struct ncclComm {
    unsigned magic;
    int ranks, rank, device, splits;
    bool warm;
    struct allocation *memory;
} *ncclComm_t;
#define COMM_MAGIC 0x6e63636cu
#define CONFIG_MAGIC 0xcafebeefu
#define UNIT ((size_t)2 << 20)

static __thread int group_depth;
static struct allocation *user_memory; /* of ncclMemAlloc */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The driver, found as NCCL's embedded runtime finds it: dlopen, then cuGetProcAddress. */
static struct {
    int (*cuCtxGetDevice)(int *);
    int (*cuMemCreate)(handle_t *, size_t, const void *, unsigned long long);
    int (*cuMemRelease)(handle_t);
    int (*cuMemAddressReserve)(unsigned long long *, size_t, size_t, unsigned long long, unsigned long long);
    int (*cuMemAddressFree)(unsigned long long, size_t);
    int (*cuMemMap)(unsigned long long, size_t, size_t, handle_t, unsigned long long);
    int (*cuMemUnmap)(unsigned long long, size_t);
    int (*cuMemSetAccess)(unsigned long long, size_t, const void *, size_t);
} driver;
static bool driver_found;

static void find_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*resolve)(const char *, void *, int, unsigned long long, int *) =
        library ? (int (*)(const char *, void *, int, unsigned long long, int *))dlsym(library, "cuGetProcAddress_v2") : NULL;
    driver_found = resolve != NULL;
#define RESOLVE(name, version)                                                                               \
    driver_found = driver_found && resolve(#name, (void *)&driver.name, version, 0, NULL) == 0 && driver.name
    RESOLVE(cuCtxGetDevice, 2000);
    RESOLVE(cuMemCreate, 10020);
    RESOLVE(cuMemRelease, 10020);
    RESOLVE(cuMemAddressReserve, 10020);
    RESOLVE(cuMemAddressFree, 10020);
    RESOLVE(cuMemMap, 10020);
    RESOLVE(cuMemUnmap, 10020);
    RESOLVE(cuMemSetAccess, 10020);
}

static bool have_driver(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find_driver);
    return driver_found;
}

static struct allocation *allocate(int device, size_t bytes)
{
    struct { int type, handle_types, location_type, location_id; void *win32; char flags[8]; } prop = {1, 1, 1, device, 0, {0}};
    struct { int location_type, location_id, flags; } access = {1, device, 3};
    struct allocation *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->bytes = (bytes + UNIT - 1) / UNIT * UNIT;
    if (driver.cuMemCreate(&made->handle, made->bytes, &prop, 0) != 0) {
        free(made);
        return NULL;
    }
    if (driver.cuMemAddressReserve(&made->base, made->bytes, 0, 0, 0) != 0 ||
        driver.cuMemMap(made->base, made->bytes, 0, made->handle, 0) != 0 ||
        driver.cuMemSetAccess(made->base, made->bytes, &access, 1) != 0) {
        driver.cuMemRelease(made->handle);
        free(made);
        return NULL;
    }
    return made;
}

static void release(struct allocation *made)
{
    driver.cuMemUnmap(made->base, made->bytes);
    driver.cuMemRelease(made->handle);
    driver.cuMemAddressFree(made->base, made->bytes);
    free(made);
}

static bool add(ncclComm_t comm, size_t bytes)
{
    struct allocation *made = allocate(comm->device, bytes);
    if (!made) return false;
    made->next = comm->memory;
    comm->memory = made;
    return true;
}

/* NCCL's proxy threads allocate, too. */
static void *proxy(void *comm)
{
    return add(comm, usage_parse_bytes(getenv("FAKE_NCCL_INIT"), (size_t)64 << 20) / 2) ? comm : NULL;
}

static bool comm_valid(ncclComm_t comm) { return comm && comm->magic == COMM_MAGIC; }

static void comm_delete(ncclComm_t comm)
{
    while (comm->memory) {
        struct allocation *made = comm->memory;
        comm->memory = made->next;
        release(made);
    }
    comm->magic = 0;
    free(comm);
}

static ncclResult_t comm_new(ncclComm_t *out, int ranks, int rank, int device)
{
    if (!out || ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    if (!have_driver()) return ncclUnhandledCudaError;
    if (device < 0 && driver.cuCtxGetDevice(&device) != 0) return ncclUnhandledCudaError;
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (!comm) return ncclInternalError;
    *comm = (struct ncclComm){.magic = COMM_MAGIC, .ranks = ranks, .rank = rank, .device = device};
    pthread_t thread;
    void *proxied = NULL;
    bool good = add(comm, usage_parse_bytes(getenv("FAKE_NCCL_INIT"), (size_t)64 << 20) / 2);
    if (good && pthread_create(&thread, NULL, proxy, comm) == 0) pthread_join(thread, &proxied);
    if (!good || !proxied) {
        comm_delete(comm);
        return ncclUnhandledCudaError;
    }
    *out = comm;
    return ncclSuccess;
}

static ncclResult_t collective(const void *send, const void *receive, ncclComm_t comm)
{
    if (!comm_valid(comm) || !send || !receive) return ncclInvalidArgument;
    if (comm->warm) return ncclSuccess;
    comm->warm = true;
    return add(comm, usage_parse_bytes(getenv("FAKE_NCCL_FIRST"), (size_t)32 << 20)) ? ncclSuccess : ncclUnhandledCudaError;
}

API(ncclResult_t, GetVersion, (int *out))
{
    if (!out) return ncclInvalidArgument;
    *out = VERSION;
    return ncclSuccess;
}
API(ncclResult_t, GetUniqueId, (ncclUniqueId *out))
{
    static atomic_uint count;
    struct timespec now;
    if (!out) return ncclInvalidArgument;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(out, 0, sizeof *out);
    snprintf(out->internal, sizeof out->internal, "fake %d %u %lld.%09ld", (int)getpid(), atomic_fetch_add(&count, 1),
             (long long)now.tv_sec, now.tv_nsec);
    return ncclSuccess;
}
static ncclResult_t init_with_config(ncclComm_t *out, int ranks, int rank, const ncclConfig_t *config)
{
    if (config && config->magic != CONFIG_MAGIC) return ncclInvalidArgument;
    return comm_new(out, ranks, rank, -1);
}
API(ncclResult_t, CommInitRankConfig, (ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config))
{
    (void)id;
    return init_with_config(out, ranks, rank, config);
}
API(ncclResult_t, CommInitRank, (ncclComm_t *out, int ranks, ncclUniqueId id, int rank))
{
    (void)id;
    return comm_new(out, ranks, rank, -1);
}
API(ncclResult_t, CommInitRankScalable, (ncclComm_t *out, int ranks, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config))
{
    if (ids < 1 || !id) return ncclInvalidArgument;
    return init_with_config(out, ranks, rank, config);
}
API(ncclResult_t, CommInitAll, (ncclComm_t *out, int count, const int *devices))
{
    if (!out || count < 1) return ncclInvalidArgument;
    for (int i = 0; i < count; i++) {
        ncclResult_t result = comm_new(&out[i], count, i, devices ? devices[i] : i);
        if (result != ncclSuccess) return result;
    }
    return ncclSuccess;
}
API(ncclResult_t, CommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config))
{
    (void)key, (void)config;
    if (!comm_valid(comm) || !out) return ncclInvalidArgument;
    comm->splits++;
    *out = NULL;
    return color < 0 ? ncclSuccess : comm_new(out, comm->ranks, comm->rank, comm->device); /* NCCL_SPLIT_NOCOLOR */
}
API(ncclResult_t, CommFinalize, (ncclComm_t comm)) { return comm_valid(comm) ? ncclSuccess : ncclInvalidArgument; }
API(ncclResult_t, CommDestroy, (ncclComm_t comm))
{
    if (!comm) return ncclSuccess;
    if (!comm_valid(comm)) return ncclInvalidArgument;
    comm_delete(comm);
    return ncclSuccess;
}
API(ncclResult_t, CommAbort, (ncclComm_t comm)) { return pncclCommDestroy(comm); }
API(ncclResult_t, CommGetAsyncError, (ncclComm_t comm, ncclResult_t *out))
{
    if (!comm_valid(comm) || !out) return ncclInvalidArgument;
    *out = ncclSuccess;
    return ncclSuccess;
}
#define GETTER(name, field)                                                                                  \
    API(ncclResult_t, name, (const ncclComm_t comm, int *out))                                               \
    {                                                                                                        \
        if (!comm_valid(comm) || !out) return ncclInvalidArgument;                                           \
        *out = comm->field;                                                                                  \
        return ncclSuccess;                                                                                  \
    }
GETTER(CommCount, ranks)
GETTER(CommUserRank, rank)
GETTER(CommCuDevice, device)

API(const char *, GetErrorString, (ncclResult_t result))
{
    switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    default: return "internal error";
    }
}
API(const char *, GetLastError, (ncclComm_t comm))
{
    (void)comm;
    return "";
}

API(ncclResult_t, AllReduce, (const void *send, void *receive, size_t count, int type, int op, ncclComm_t comm, cudaStream_t stream))
{
    (void)count, (void)type, (void)op, (void)stream;
    return collective(send, receive, comm);
}
API(ncclResult_t, Broadcast, (const void *send, void *receive, size_t count, int type, int root, ncclComm_t comm, cudaStream_t stream))
{
    (void)count, (void)type, (void)root, (void)stream;
    return collective(send, receive, comm);
}
API(ncclResult_t, Bcast, (void *buffer, size_t count, int type, int root, ncclComm_t comm, cudaStream_t stream))
{
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream); /* through its own export, as NCCL does */
}
API(ncclResult_t, Reduce, (const void *send, void *receive, size_t count, int type, int op, int root, ncclComm_t comm, cudaStream_t stream))
{
    (void)count, (void)type, (void)op, (void)root, (void)stream;
    return collective(send, receive ? receive : send, comm);
}
API(ncclResult_t, AllGather, (const void *send, void *receive, size_t count, int type, ncclComm_t comm, cudaStream_t stream))
{
    (void)count, (void)type, (void)stream;
    return collective(send, receive, comm);
}
API(ncclResult_t, ReduceScatter, (const void *send, void *receive, size_t count, int type, int op, ncclComm_t comm, cudaStream_t stream))
{
    (void)count, (void)type, (void)op, (void)stream;
    return collective(send, receive, comm);
}
API(ncclResult_t, AlltoAll, (const void *send, void *receive, size_t count, int type, ncclComm_t comm, cudaStream_t stream))
{
    (void)count, (void)type, (void)stream;
    return collective(send, receive, comm);
}
API(ncclResult_t, Send, (const void *send, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream))
{
    (void)count, (void)type, (void)stream;
    if (comm_valid(comm) && (peer < 0 || peer >= comm->ranks)) return ncclInvalidArgument;
    return collective(send, send, comm);
}
API(ncclResult_t, Recv, (void *receive, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream))
{
    return pncclSend(receive, count, type, peer, comm, stream);
}

API(ncclResult_t, GroupStart, (void))
{
    group_depth++;
    return ncclSuccess;
}
API(ncclResult_t, GroupEnd, (void))
{
    if (!group_depth) return ncclInvalidUsage;
    group_depth--;
    return ncclSuccess;
}

API(ncclResult_t, MemAlloc, (void **out, size_t bytes))
{
    int device;
    if (!out || !bytes) return ncclInvalidArgument;
    if (!have_driver() || driver.cuCtxGetDevice(&device) != 0) return ncclUnhandledCudaError;
    struct allocation *made = allocate(device, bytes);
    if (!made) return ncclUnhandledCudaError;
    pthread_mutex_lock(&lock);
    made->next = user_memory;
    user_memory = made;
    pthread_mutex_unlock(&lock);
    *out = (void *)(uintptr_t)made->base;
    return ncclSuccess;
}
API(ncclResult_t, MemFree, (void *pointer))
{
    struct allocation *found = NULL;
    if (!pointer) return ncclSuccess;
    pthread_mutex_lock(&lock);
    for (struct allocation **at = &user_memory; *at && !found; at = &(*at)->next) {
        if ((*at)->base != (uintptr_t)pointer) continue;
        found = *at;
        *at = found->next;
        break;
    }
    pthread_mutex_unlock(&lock);
    if (!found) return ncclInvalidArgument;
    release(found);
    return ncclSuccess;
}
API(ncclResult_t, CommRegister, (const ncclComm_t comm, void *buffer, size_t bytes, void **out))
{
    if (!comm_valid(comm) || !buffer || !bytes || !out) return ncclInvalidArgument;
    *out = buffer;
    return ncclSuccess;
}
API(ncclResult_t, CommDeregister, (const ncclComm_t comm, void *handle))
{
    return comm_valid(comm) && handle ? ncclSuccess : ncclInvalidArgument;
}
API(ncclResult_t, CommWindowRegister, (ncclComm_t comm, void *buffer, size_t bytes, void **out, int flags))
{
    (void)flags;
    return pncclCommRegister(comm, buffer, bytes, out);
}
API(ncclResult_t, CommWindowDeregister, (ncclComm_t comm, void *window)) { return pncclCommDeregister(comm, window); }
API(ncclResult_t, GroupSimulateEnd, (void *info))
{
    (void)info;
    return pncclGroupEnd();
}
API(ncclResult_t, RedOpCreatePreMulSum, (int *op, void *scalar, int type, int residence, ncclComm_t comm))
{
    static atomic_int next = 5; /* after the built-in operations */
    (void)type, (void)residence;
    if (!op || !scalar || !comm_valid(comm)) return ncclInvalidArgument;
    *op = atomic_fetch_add(&next, 1);
    return ncclSuccess;
}
API(ncclResult_t, RedOpDestroy, (int op, ncclComm_t comm)) { return op >= 5 && comm_valid(comm) ? ncclSuccess : ncclInvalidArgument; }

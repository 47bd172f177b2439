/* libnccl.so.2: NCCL's exported boundary without data.
 *
 * Calls move no data. What is real is the memory: like NCCL it allocates through cuMemCreate, at initialisation partly from a thread
 * of its own, at a communicator's first operation all from there, and frees at destroy. In a job (FAKE_NCCL_JOB, nccl_meet.h) its
 * ranks really meet: initialisation and splits wait for all ranks, and what does not match never completes.
 * `ncclX` is a weak name and `pncclX` a strong one of the same function, as in NCCL (core.h, NCCL_API), and some functions call
 * others by their exported names, as NCCL's do.
 *
 *   FAKE_NCCL_INIT=64MiB     what a communicator takes at initialisation (default 64MiB)
 *   FAKE_NCCL_FIRST=32MiB    what it takes more at its first collective or send (default 32MiB)
 *   FAKE_NCCL_BLOCKING=1     collectives and messages wait inside the call (default: fakeNcclWait waits for them)
 *   FAKE_NCCL_KERNEL=500     microseconds that an operation keeps its stream busy (default 0); in a job with FAKE_NCCL_BLOCKING, from when
 *                            the last rank's stream came to it
 *   FAKE_NCCL_TIMEOUT=1800   seconds until a wait gives up with ncclSystemError
 *   FAKE_NCCL_VERSION=22809  NCCL_VERSION_CODE
 *   NCCL_DEBUG=INFO          NCCL's own lines of what was made, called and allocated, in NCCL_DEBUG_FILE (%p: process id) */
#define _GNU_SOURCE
#include "driver/usage.h"
#include "nccl_meet.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))
/* Defines pnccl##name and makes nccl##name a weak alias of it. */
#define API(type, name, parameters)                                                                          \
    EXPORT type pnccl##name parameters;                                                                      \
    EXPORT __attribute__((weak, alias("pnccl" #name))) type nccl##name parameters;                           \
    type pnccl##name parameters

enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7
};

typedef int ncclResult_t;
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { size_t size; unsigned magic, version; int blocking; } ncclConfig_t; /* the first fields of any version */
typedef struct { int opCnt, peer, sigIdx, ctx; } ncclWaitSignalDesc_t;
typedef void *cudaStream_t;

typedef unsigned long long handle_t;
struct allocation {
    struct allocation *next;
    handle_t handle;
    unsigned long long base;
    size_t bytes;
};
/* The communicator's own thread, which allocates what callers ask for, as NCCL's proxy does. */
struct proxy {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    size_t wanted;
    bool running, answered, good, over;
};
typedef struct ncclComm {
    unsigned magic;
    int ranks, rank, device, splits, shrinks;
    bool warm, blocking;
    atomic_int state; /* ncclResult_t of the last thing that happened in the background */
    atomic_bool aborted;
    uint64_t key, hash; /* hash: NCCL's own, of a communicator with a unique id */
    struct meeting *meeting;
    struct allocation *memory;
    struct proxy proxy;
} *ncclComm_t;
#define COMM_MAGIC 0x6e63636cu
#define CONFIG_MAGIC 0xcafebeefu
#define UNIT ((size_t)2 << 20)
#define GROUPED 64

/* A communicator that is being made. */
struct making {
    ncclComm_t comm, *out;
    struct meeting *parent; /* NULL for one that is not split off */
    int parent_rank, parent_ranks, split, color, key;
    ncclResult_t result;
    pthread_t thread;
};

static __thread int group_depth;
static __thread struct making *group_making[GROUPED];
static __thread ncclComm_t group_comms[GROUPED];
static __thread int n_group_making, n_group_comms;
static __thread cudaStream_t op_stream; /* of the operation that is being called */
/* Kernels that the thread has not launched yet. */
static __thread struct { ncclComm_t comm; cudaStream_t stream; uint64_t number; } launches[GROUPED];
static __thread int n_launches;
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
    void (*fakeCudaBusyUntil)(cudaStream_t, unsigned long long);
    unsigned long long (*fakeCudaFreeAt)(cudaStream_t);
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
    if (!driver_found) return;
    driver.fakeCudaBusyUntil = (void (*)(cudaStream_t, unsigned long long))dlsym(library, "fakeCudaBusyUntil");
    driver.fakeCudaFreeAt = (unsigned long long (*)(cudaStream_t))dlsym(library, "fakeCudaFreeAt");
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

/* A line as NCCL 2.28 logs it. */
__attribute__((format(printf, 1, 2))) static void log_line(const char *format, ...)
{
    static FILE *file;
    static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
    const char *level = getenv("NCCL_DEBUG"), *wanted = getenv("NCCL_DEBUG_FILE");
    if (!level || strcmp(level, "INFO") != 0 || !wanted) return;
    pthread_mutex_lock(&log_lock);
    if (!file) {
        char path[4096] = "";
        const char *place = strstr(wanted, "%p");
        if (place) snprintf(path, sizeof path, "%.*s%d%s", (int)(place - wanted), wanted, (int)getpid(), place + 2);
        file = fopen(place ? path : wanted, "w");
    }
    if (file) {
        va_list values;
        va_start(values, format);
        fprintf(file, "fake:%d:%d [0] NCCL INFO ", (int)getpid(), (int)gettid());
        vfprintf(file, format, values);
        fputc('\n', file);
        fflush(file);
        va_end(values);
    }
    pthread_mutex_unlock(&log_lock);
}

/* NCCL's hash since 2.26 (src/include/bitops.h: eatHash, digestHash). */
static uint64_t comm_hash(const void *bytes, size_t n)
{
    uint64_t a = 1 ^ n, b = 1, h;
    for (const char *at = bytes; n;) {
        size_t chunk = n < 8 ? n : 8;
        uint64_t word = 0;
        a += b, b ^= a, a ^= a >> 31, a *= 0x9de62bbc8cef3ce3u, b ^= b >> 32, b *= 0x485cd6311b599e79u;
        memcpy(&word, at, chunk);
        at += chunk, n -= chunk, a += word;
    }
    h = a, h ^= h >> 31, h *= 0xbac3bd562846de6bu, h += b, h ^= h >> 32;
    return h * 0x995a187a14e7b445u;
}

static bool add(ncclComm_t comm, size_t bytes)
{
    struct allocation *made = allocate(comm->device, bytes);
    if (!made) return false;
    made->next = comm->memory;
    comm->memory = made;
    log_line("fake.cc:1 Cuda Alloc Size %zu pointer %p", bytes, (void *)(uintptr_t)made->base);
    return true;
}

static void *serve(void *argument)
{
    ncclComm_t comm = argument;
    struct proxy *proxy = &comm->proxy;
    pthread_mutex_lock(&proxy->lock);
    while (!proxy->over) {
        if (proxy->wanted) {
            proxy->good = add(comm, proxy->wanted);
            proxy->wanted = 0;
            proxy->answered = true;
            pthread_cond_broadcast(&proxy->changed);
        }
        pthread_cond_wait(&proxy->changed, &proxy->lock);
    }
    pthread_mutex_unlock(&proxy->lock);
    return NULL;
}

static bool proxy_start(ncclComm_t comm)
{
    struct proxy *proxy = &comm->proxy;
    pthread_mutex_init(&proxy->lock, NULL);
    pthread_cond_init(&proxy->changed, NULL);
    proxy->running = pthread_create(&proxy->thread, NULL, serve, comm) == 0;
    return proxy->running;
}

/* Asks the proxy thread for memory and waits for it. */
static bool proxy_allocate(ncclComm_t comm, size_t bytes)
{
    struct proxy *proxy = &comm->proxy;
    pthread_mutex_lock(&proxy->lock);
    proxy->wanted = bytes;
    proxy->answered = false;
    pthread_cond_broadcast(&proxy->changed);
    while (!proxy->answered) pthread_cond_wait(&proxy->changed, &proxy->lock);
    bool good = proxy->good;
    pthread_mutex_unlock(&proxy->lock);
    return good;
}

static void proxy_stop(ncclComm_t comm)
{
    struct proxy *proxy = &comm->proxy;
    if (!proxy->running) return;
    pthread_mutex_lock(&proxy->lock);
    proxy->over = true;
    pthread_cond_broadcast(&proxy->changed);
    pthread_mutex_unlock(&proxy->lock);
    pthread_join(proxy->thread, NULL);
}

static bool comm_valid(ncclComm_t comm) { return comm && comm->magic == COMM_MAGIC; }

/* Gives back what the communicator has; a call that still waits in another thread may look at it. */
static void comm_close(ncclComm_t comm)
{
    proxy_stop(comm);
    while (comm->memory) {
        struct allocation *made = comm->memory;
        comm->memory = made->next;
        release(made);
    }
    comm->magic = 0;
}

static void comm_delete(ncclComm_t comm)
{
    comm_close(comm);
    if (comm->meeting) munmap(comm->meeting, sizeof *comm->meeting);
    free(comm);
}

static ncclResult_t result_of(enum meet_end end)
{
    return end == MEET_DONE ? ncclSuccess : end == MEET_ABORTED ? ncclInternalError : ncclSystemError;
}

/* Which ranks of the parent have the same color, and the place among them by key. */
static bool split_members(struct making *making)
{
    ncclComm_t comm = making->comm;
    _Atomic uint64_t *said = making->parent->split[making->split % MEET_SPLITS];
    comm->ranks = comm->rank = 0;
    for (int rank = 0; rank < making->parent_ranks; rank++) {
        uint64_t word = atomic_load(&said[rank]);
        if (!word) return false;
        int color = (int)(word >> 32) - 2, key = (int)(uint32_t)word;
        if (color != making->color) continue;
        comm->ranks++;
        comm->rank += key < making->key || (key == making->key && rank < making->parent_rank);
    }
    return true;
}

static ncclResult_t make(struct making *making)
{
    ncclComm_t comm = making->comm;
    size_t bytes = usage_parse_bytes(getenv("FAKE_NCCL_INIT"), (size_t)64 << 20);
    if (making->parent) {
        enum meet_end end = MEET_WAIT(split_members(making), atomic_load(&comm->aborted));
        if (end != MEET_DONE) return result_of(end);
    }
    if (making->color < 0) return ncclSuccess; /* NCCL_SPLIT_NOCOLOR */
    if (meet_job() && comm->ranks <= MEET_RANKS) comm->meeting = meet_open(comm->key);
    if (comm->meeting) {
        atomic_fetch_or(&comm->meeting->come, 1ull << comm->rank);
        enum meet_end end = MEET_WAIT(meet_all_came(comm->meeting, comm->ranks), atomic_load(&comm->aborted));
        if (end != MEET_DONE) return result_of(end);
    }
    if (!add(comm, bytes / 2) || !proxy_start(comm) || !proxy_allocate(comm, bytes / 2)) return ncclUnhandledCudaError;
    if (comm->hash)
        log_line("ncclCommInitRank comm %p rank %d nranks %d cudaDev %d nvmlDev %d busId 1000 commId 0x%llx - Init COMPLETE", (void *)comm,
                 comm->rank, comm->ranks, comm->device, comm->device, (unsigned long long)comm->hash);
    return ncclSuccess;
}

static void *make_in_thread(void *argument)
{
    struct making *making = argument;
    making->result = make(making);
    return NULL;
}

static void *make_in_background(void *argument)
{
    struct making *making = argument;
    ncclComm_t comm = making->comm;
    ncclResult_t result = make(making);
    if (making->color >= 0) *making->out = comm;
    atomic_store(&comm->state, result);
    free(making);
    return NULL;
}

/* Ends a making that nobody waits for in another way. */
static ncclResult_t made(struct making *making, ncclResult_t result)
{
    bool is_good = result == ncclSuccess && making->color >= 0;
    *making->out = is_good ? making->comm : NULL;
    if (!is_good) comm_delete(making->comm);
    free(making);
    return result;
}

/* Makes a communicator now, in the background, or at the end of the group. */
static ncclResult_t begin(struct making wanted)
{
    struct making *making = malloc(sizeof *making);
    if (!making) return ncclInternalError;
    *making = wanted;
    *making->out = making->parent ? NULL : making->comm;
    if (!making->comm->blocking) {
        atomic_store(&making->comm->state, ncclInProgress);
        if (pthread_create(&making->thread, NULL, make_in_background, making) != 0) return made(making, ncclInternalError);
        pthread_detach(making->thread);
        return ncclInProgress;
    }
    if (group_depth && n_group_making < GROUPED) {
        group_making[n_group_making++] = making;
        return ncclSuccess;
    }
    return made(making, make(making));
}

static ncclComm_t comm_new(int ranks, int rank, int device, uint64_t key, bool blocking)
{
    ncclComm_t comm = calloc(1, sizeof *comm);
    if (!comm) return NULL;
    comm->magic = COMM_MAGIC;
    comm->ranks = ranks;
    comm->rank = rank;
    comm->device = device;
    comm->key = key;
    comm->blocking = blocking;
    return comm;
}

static ncclResult_t init(ncclComm_t *out, int ranks, int rank, int device, const ncclUniqueId *id, bool blocking)
{
    static atomic_uint uses[256];
    if (!out || ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
    if (!have_driver()) return ncclUnhandledCudaError;
    if (device < 0 && driver.cuCtxGetDevice(&device) != 0) return ncclUnhandledCudaError;
    uint64_t key = meet_mix(0xcbf29ce484222325u, id, sizeof *id);
    /* An id can be used again, and then it is another communicator. */
    unsigned ordinal = atomic_fetch_add(&uses[(key ^ key >> 32 ^ (uint64_t)rank * 7) % 256], 1);
    ncclComm_t comm = comm_new(ranks, rank, device, meet_mix(key, &ordinal, sizeof ordinal), blocking);
    if (!comm) return ncclInternalError;
    comm->hash = comm_hash(id, sizeof *id);
    return begin((struct making){.comm = comm, .out = out, .color = 0});
}

static uint64_t signature(int kind, size_t count, int type, int redop, int root)
{
    struct { uint64_t kind, count, type, redop, root; } all = {(uint64_t)kind, count, (uint64_t)type, redop < 5 ? (uint64_t)redop : 5, (uint64_t)root};
    return meet_mix(0xcbf29ce484222325u, &all, sizeof all);
}

static ncclResult_t wait_for(ncclComm_t comm)
{
    if (!comm->meeting) return ncclSuccess;
    enum meet_end end = MEET_WAIT(meet_collectives_complete(comm->meeting, comm->rank, comm->ranks) &&
                                      meet_messages_complete(comm->meeting, comm->rank, comm->ranks),
                                  atomic_load(&comm->aborted));
    return result_of(end);
}

static bool is_blocking(void)
{
    const char *blocking = getenv("FAKE_NCCL_BLOCKING");
    return blocking && atoi(blocking) != 0;
}

static unsigned long long kernel_nanos(void)
{
    const char *micros = getenv("FAKE_NCCL_KERNEL");
    return micros ? strtoull(micros, NULL, 10) * 1000 : 0;
}

/* When the last rank's stream comes to a collective; 0 if one has not said so yet. */
static uint64_t last_start(struct meeting *meeting, int ranks, uint64_t number)
{
    uint64_t last = 0;
    for (int rank = 0; rank < ranks; rank++) {
        uint64_t start = atomic_load(&meeting->starts[rank][number % MEET_REMEMBERED]);
        if (!start) return 0;
        if (start > last) last = start;
    }
    return last;
}

/* Keeps streams busy with what was called. */
static void launch(void)
{
    unsigned long long kernel = kernel_nanos();
    for (int i = 0; kernel && i < n_launches; i++) {
        ncclComm_t comm = launches[i].comm;
        uint64_t number = launches[i].number, start = driver.fakeCudaFreeAt(launches[i].stream);
        if (comm->meeting && number != UINT64_MAX) {
            atomic_store(&comm->meeting->starts[comm->rank][number % MEET_REMEMBERED], start);
            if (is_blocking() && MEET_WAIT(last_start(comm->meeting, comm->ranks, number), atomic_load(&comm->aborted)) == MEET_DONE)
                start = last_start(comm->meeting, comm->ranks, number);
        }
        driver.fakeCudaBusyUntil(launches[i].stream, start + kernel);
    }
    n_launches = 0;
}

/* After an operation was noted: launches it and waits, if that is wanted, now or at the end of the group. */
static ncclResult_t operated(ncclComm_t comm, uint64_t number)
{
    if (n_launches < GROUPED) {
        launches[n_launches].comm = comm, launches[n_launches].stream = op_stream, launches[n_launches].number = number;
        n_launches++;
    }
    if (!group_depth) launch();
    if (!is_blocking()) return ncclSuccess;
    if (!group_depth) return wait_for(comm);
    for (int i = 0; i < n_group_comms; i++)
        if (group_comms[i] == comm) return ncclSuccess;
    if (n_group_comms < GROUPED) group_comms[n_group_comms++] = comm;
    return ncclSuccess;
}

static ncclResult_t ready(ncclComm_t comm)
{
    if (!comm_valid(comm)) return ncclInvalidArgument;
    int state = atomic_load(&comm->state);
    if (state == ncclInProgress) return ncclInvalidUsage;
    if (state != ncclSuccess) return ncclInternalError;
    if (comm->warm) return ncclSuccess;
    comm->warm = true;
    size_t bytes = usage_parse_bytes(getenv("FAKE_NCCL_FIRST"), (size_t)32 << 20);
    return proxy_allocate(comm, bytes) ? ncclSuccess : ncclUnhandledCudaError;
}

static void log_call(const char *name, const void *send, const void *receive, size_t count, int type, int redop, int root, ncclComm_t comm)
{
    log_line("%s: opCount 0 sendbuff %p recvbuff %p count %zu datatype %d op %d root %d comm %p [nranks=%d] stream %p", name, send, receive,
             count, type, redop, root, (void *)comm, comm->ranks, NULL);
}

enum { ALL_REDUCE = 1, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER };

static ncclResult_t collective(int kind, const void *send, const void *receive, size_t count, int type, int redop, int root, ncclComm_t comm)
{
    if (!comm_valid(comm) || !send || !receive || root >= comm->ranks) return ncclInvalidArgument;
    ncclResult_t result = ready(comm);
    if (result != ncclSuccess) return result;
    static const char *const names[] = {"", "AllReduce", "Broadcast", "Reduce", "AllGather", "ReduceScatter", "AlltoAll", "Gather", "Scatter"};
    log_call(names[kind], send, receive, count, type, redop, root, comm);
    uint64_t number = comm->meeting ? atomic_load(&comm->meeting->collectives[comm->rank]) : 0;
    if (comm->meeting) meet_collective(comm->meeting, comm->rank, signature(kind, count, type, redop, root));
    return operated(comm, number);
}

static ncclResult_t message(ncclComm_t comm, const void *buffer, size_t count, int type, int peer, bool sends)
{
    if (!comm_valid(comm) || !buffer || peer < 0 || peer >= comm->ranks) return ncclInvalidArgument;
    ncclResult_t result = ready(comm);
    if (result != ncclSuccess) return result;
    log_call(sends ? "Send" : "Recv", sends ? buffer : NULL, buffer, count, type, 0, peer, comm);
    if (comm->meeting && sends) atomic_fetch_add(&comm->meeting->sent[comm->rank][peer], 1);
    if (comm->meeting && !sends) atomic_fetch_add(&comm->meeting->received[peer][comm->rank], 1);
    return operated(comm, UINT64_MAX);
}

API(ncclResult_t, GetVersion, (int *out))
{
    const char *version = getenv("FAKE_NCCL_VERSION");
    if (!out) return ncclInvalidArgument;
    *out = version && *version ? atoi(version) : 22809;
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

static bool blocks(const ncclConfig_t *config, bool otherwise)
{
    return config && config->blocking >= 0 ? config->blocking != 0 : otherwise;
}
static ncclResult_t init_with_config(ncclComm_t *out, int ranks, int rank, const ncclUniqueId *id, const ncclConfig_t *config)
{
    if (config && config->magic != CONFIG_MAGIC) return ncclInvalidArgument;
    return init(out, ranks, rank, -1, id, blocks(config, true));
}
API(ncclResult_t, CommInitRankConfig, (ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config))
{
    return init_with_config(out, ranks, rank, &id, config);
}
API(ncclResult_t, CommInitRank, (ncclComm_t *out, int ranks, ncclUniqueId id, int rank))
{
    return init(out, ranks, rank, -1, &id, true);
}
API(ncclResult_t, CommInitRankScalable, (ncclComm_t *out, int ranks, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config))
{
    if (ids < 1 || !id) return ncclInvalidArgument;
    return init_with_config(out, ranks, rank, id, config);
}
static ncclResult_t group_close(void);
API(ncclResult_t, CommInitAll, (ncclComm_t *out, int count, const int *devices))
{
    ncclUniqueId id;
    if (!out || count < 1) return ncclInvalidArgument;
    ncclGetUniqueId(&id); /* through its own export, as NCCL does */
    group_depth++;
    for (int i = 0; i < count; i++) {
        ncclResult_t result = init(&out[i], count, i, devices ? devices[i] : i, &id, true);
        if (result != ncclSuccess) return result;
    }
    return --group_depth ? ncclSuccess : group_close();
}
API(ncclResult_t, CommSplit, (ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config))
{
    if (!comm_valid(comm) || !out) return ncclInvalidArgument;
    int split = comm->splits++;
    uint64_t name = meet_mix(meet_mix(comm->key, &split, sizeof split), &color, sizeof color);
    ncclComm_t child = comm_new(comm->ranks, comm->rank, comm->device, name, blocks(config, comm->blocking));
    if (!child) return ncclInternalError;
    if (comm->meeting)
        atomic_store(&comm->meeting->split[split % MEET_SPLITS][comm->rank], (uint64_t)(uint32_t)(color + 2) << 32 | (uint32_t)key);
    return begin((struct making){.comm = child, .out = out, .parent = comm->meeting, .parent_rank = comm->rank,
                                 .parent_ranks = comm->ranks, .split = split, .color = color, .key = key});
}
API(ncclResult_t, CommShrink, (ncclComm_t comm, int *excluded, int n_excluded, ncclComm_t *out, ncclConfig_t *config, int flags))
{
    if (!comm_valid(comm) || !out || n_excluded < 1 || !excluded) return ncclInvalidArgument;
    (void)flags;
    int rank = comm->rank, shrink = -1 - comm->shrinks++;
    for (int i = 0; i < n_excluded; i++) {
        if (excluded[i] == comm->rank) return ncclInvalidArgument;
        rank -= excluded[i] < comm->rank;
    }
    uint64_t name = meet_mix(comm->key, &shrink, sizeof shrink);
    ncclComm_t child = comm_new(comm->ranks - n_excluded, rank, comm->device, name, blocks(config, comm->blocking));
    if (!child) return ncclInternalError;
    return begin((struct making){.comm = child, .out = out});
}
API(ncclResult_t, CommGetUniqueId, (ncclComm_t comm, ncclUniqueId *out))
{
    return comm_valid(comm) ? ncclGetUniqueId(out) : ncclInvalidArgument;
}
API(ncclResult_t, CommGrow, (ncclComm_t comm, int ranks, const ncclUniqueId *id, int rank, ncclComm_t *out, ncclConfig_t *config))
{
    ncclUniqueId none = {{0}};
    if (comm && !comm_valid(comm)) return ncclInvalidArgument;
    return init_with_config(out, ranks, rank >= 0 || !comm ? rank : comm->rank, id ? id : &none, config);
}
API(ncclResult_t, CommFinalize, (ncclComm_t comm)) { return comm_valid(comm) ? wait_for(comm) : ncclInvalidArgument; }
API(ncclResult_t, CommDestroy, (ncclComm_t comm))
{
    if (!comm) return ncclSuccess;
    if (!comm_valid(comm)) return ncclInvalidArgument;
    comm_delete(comm);
    return ncclSuccess;
}
API(ncclResult_t, CommAbort, (ncclComm_t comm))
{
    if (!comm_valid(comm)) return comm ? ncclInvalidArgument : ncclSuccess;
    atomic_store(&comm->aborted, true);
    if (atomic_load(&comm->state) == ncclInProgress) return ncclSuccess; /* its own thread still uses it */
    comm_close(comm);
    return ncclSuccess;
}
API(ncclResult_t, CommRevoke, (ncclComm_t comm, int flags))
{
    if (!comm_valid(comm) || flags) return ncclInvalidArgument;
    atomic_store(&comm->aborted, true);
    return ncclSuccess;
}
API(ncclResult_t, CommSuspend, (ncclComm_t comm, int flags)) { return comm_valid(comm) && flags ? ncclSuccess : ncclInvalidArgument; }
API(ncclResult_t, CommResume, (ncclComm_t comm)) { return comm_valid(comm) ? ncclSuccess : ncclInvalidArgument; }
API(ncclResult_t, CommGetAsyncError, (ncclComm_t comm, ncclResult_t *out))
{
    if (!comm_valid(comm) || !out) return ncclInvalidArgument;
    *out = atomic_load(&comm->state);
    return ncclSuccess;
}
/* Makes ncclCommGetAsyncError say so: a network that broke. */
EXPORT void fakeNcclBreak(ncclComm_t comm, ncclResult_t error) { atomic_store(&comm->state, error); }
/* Waits, as for a stream, until everything that was called is complete. */
EXPORT ncclResult_t fakeNcclWait(ncclComm_t comm) { return comm_valid(comm) ? wait_for(comm) : ncclInvalidArgument; }
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

/* A collective, and the same with a configuration of its own (2.31). */
#define COLLECTIVE(name, kind, parameters, redop, root)                                                      \
    API(ncclResult_t, name, (const void *send, void *receive, size_t count, int type PARAMETERS parameters, ncclComm_t comm, cudaStream_t stream)) \
    {                                                                                                        \
        op_stream = stream;                                                                                  \
        return collective(kind, send, receive, count, type, redop, root, comm);                              \
    }                                                                                                        \
    API(ncclResult_t, name##Config, (const void *send, void *receive, size_t count, int type PARAMETERS parameters, ncclComm_t comm, cudaStream_t stream, const void *config)) \
    {                                                                                                        \
        op_stream = stream, (void)config;                                                                    \
        return collective(kind, send, receive, count, type, redop, root, comm);                              \
    }
#define PARAMETERS(...) __VA_OPT__(, ) __VA_ARGS__
COLLECTIVE(AllReduce, ALL_REDUCE, (int op), op, 0)
COLLECTIVE(Broadcast, BROADCAST, (int root), 0, root)
COLLECTIVE(AllGather, ALL_GATHER, (), 0, 0)
COLLECTIVE(ReduceScatter, REDUCE_SCATTER, (int op), op, 0)
COLLECTIVE(AlltoAll, ALL_TO_ALL, (), 0, 0)
COLLECTIVE(Gather, GATHER, (int root), 0, root)
COLLECTIVE(Scatter, SCATTER, (int root), 0, root)
API(ncclResult_t, Reduce, (const void *send, void *receive, size_t count, int type, int op, int root, ncclComm_t comm, cudaStream_t stream))
{
    op_stream = stream;
    return collective(REDUCE, send, receive ? receive : send, count, type, op, root, comm);
}
API(ncclResult_t, ReduceConfig, (const void *send, void *receive, size_t count, int type, int op, int root, ncclComm_t comm, cudaStream_t stream, const void *config))
{
    (void)config;
    return pncclReduce(send, receive, count, type, op, root, comm, stream);
}
API(ncclResult_t, Bcast, (void *buffer, size_t count, int type, int root, ncclComm_t comm, cudaStream_t stream))
{
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream); /* through its own export, as NCCL does */
}
API(ncclResult_t, Send, (const void *send, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream))
{
    op_stream = stream;
    return message(comm, send, count, type, peer, true);
}
API(ncclResult_t, Recv, (void *receive, size_t count, int type, int peer, ncclComm_t comm, cudaStream_t stream))
{
    op_stream = stream;
    return message(comm, receive, count, type, peer, false);
}
API(ncclResult_t, PutSignal, (const void *local, size_t count, int type, int peer, void *window, size_t offset, int signal, int context, unsigned flags, ncclComm_t comm, cudaStream_t stream))
{
    (void)count, (void)type, (void)offset, (void)signal, (void)context, (void)flags, (void)stream;
    return comm_valid(comm) && local && window && peer >= 0 && peer < comm->ranks ? ready(comm) : ncclInvalidArgument;
}
API(ncclResult_t, Signal, (int peer, int signal, int context, unsigned flags, ncclComm_t comm, cudaStream_t stream))
{
    (void)signal, (void)context, (void)flags, (void)stream;
    return comm_valid(comm) && peer >= 0 && peer < comm->ranks ? ready(comm) : ncclInvalidArgument;
}
API(ncclResult_t, WaitSignal, (int n, ncclWaitSignalDesc_t *signals, ncclComm_t comm, cudaStream_t stream))
{
    (void)stream;
    return comm_valid(comm) && n > 0 && signals ? ready(comm) : ncclInvalidArgument;
}

/* Does what the group has put off: makes its communicators, all at once, and waits for its operations. */
static ncclResult_t group_close(void)
{
    ncclResult_t result = ncclSuccess;
    for (int i = 0; i < n_group_making; i++)
        if (pthread_create(&group_making[i]->thread, NULL, make_in_thread, group_making[i]) != 0) return ncclInternalError;
    for (int i = 0; i < n_group_making; i++) {
        pthread_join(group_making[i]->thread, NULL);
        ncclResult_t one = made(group_making[i], group_making[i]->result);
        result = result == ncclSuccess ? one : result;
    }
    launch();
    for (int i = 0; i < n_group_comms; i++) {
        ncclResult_t one = wait_for(group_comms[i]);
        result = result == ncclSuccess ? one : result;
    }
    n_group_making = n_group_comms = 0;
    return result;
}
API(ncclResult_t, GroupStart, (void))
{
    group_depth++;
    return ncclSuccess;
}
API(ncclResult_t, GroupEnd, (void))
{
    if (!group_depth) return ncclInvalidUsage;
    return --group_depth ? ncclSuccess : group_close();
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
    n_group_comms = n_launches = 0;
    return pncclGroupEnd();
}
API(ncclResult_t, DevCommCreate, (ncclComm_t comm, const void *requirements, void *out))
{
    return comm_valid(comm) && requirements && out ? ready(comm) : ncclInvalidArgument;
}
API(ncclResult_t, DevCommDestroy, (ncclComm_t comm, const void *dev_comm)) { return comm_valid(comm) && dev_comm ? ncclSuccess : ncclInvalidArgument; }
API(ncclResult_t, RedOpCreatePreMulSum, (int *op, void *scalar, int type, int residence, ncclComm_t comm))
{
    static atomic_int next = 5; /* after the built-in operations */
    (void)type, (void)residence;
    if (!op || !scalar || !comm_valid(comm)) return ncclInvalidArgument;
    *op = atomic_fetch_add(&next, 1);
    return ncclSuccess;
}
API(ncclResult_t, RedOpDestroy, (int op, ncclComm_t comm)) { return op >= 5 && comm_valid(comm) ? ncclSuccess : ncclInvalidArgument; }

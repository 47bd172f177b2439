/* What the files of the fake driver share: types, the call macros, and each file's interface.
 *
 * The layouts are those of cuda.h 11.8 to 13.5 (the same in all three); only the fields that the fake reads are named. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define MAX_DEVICES 16 /* DEVICE_LIMIT of device.h, USAGE_DEVICES of usage.h */

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned int CUdeviceptr_v1; /* the 32-bit ABI of CUDA 2.x */
typedef unsigned long long cuuint64_t;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct event *CUevent;
typedef struct pool *CUmemoryPool;
typedef struct array *CUarray;
typedef struct array *CUmipmappedArray;
typedef struct graph *CUgraph;
typedef struct graph_node *CUgraphNode;
typedef struct graph_exec *CUgraphExec;
typedef struct { char bytes[16]; } CUuuid;

/* CUresult, cuda.h 13.5 */
enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_MAP_FAILED = 205,
    CUDA_ERROR_ALREADY_MAPPED = 208,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_UNKNOWN = 999,
};

typedef struct { int type; int id; } CUmemLocation; /* 8 bytes */
enum { LOCATION_DEVICE = 1, LOCATION_HOST = 2, LOCATION_HOST_NUMA = 3, LOCATION_HOST_NUMA_CURRENT = 4 };
typedef struct {
    int type;
    int requested_handle_types;
    CUmemLocation location;
    void *win32;
    unsigned char flags[8];
} CUmemAllocationProp; /* 32 bytes */
typedef struct {
    int type;
    int handle_types;
    CUmemLocation location;
    void *win32;
    size_t max_size;
    unsigned char reserved[56];
} CUmemPoolProps; /* 88 bytes */
typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc; /* 12 bytes */
typedef struct { char bytes[64]; } CUipcMemHandle;
typedef struct {
    CUmemPoolProps pool_props;
    const CUmemAccessDesc *access;
    size_t access_count;
    size_t bytesize;
    CUdeviceptr dptr;
} CUDA_MEM_ALLOC_NODE_PARAMS; /* 120 bytes */
typedef struct { size_t width, height; int format; unsigned channels; } CUDA_ARRAY_DESCRIPTOR; /* 24 bytes */
typedef struct {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
} CUDA_ARRAY3D_DESCRIPTOR; /* 40 bytes */

_Static_assert(sizeof(CUmemAllocationProp) == 32, "cuda.h CUmemAllocationProp");
_Static_assert(sizeof(CUmemPoolProps) == 88, "cuda.h CUmemPoolProps");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "cuda.h CUmemAccessDesc");
_Static_assert(sizeof(CUDA_MEM_ALLOC_NODE_PARAMS) == 120, "cuda.h CUDA_MEM_ALLOC_NODE_PARAMS");
_Static_assert(sizeof(CUDA_ARRAY_DESCRIPTOR) == 24, "cuda.h CUDA_ARRAY_DESCRIPTOR");
_Static_assert(sizeof(CUDA_ARRAY3D_DESCRIPTOR) == 40, "cuda.h CUDA_ARRAY3D_DESCRIPTOR");

/* call.c: what happens around every entry point. */
enum need { NEEDS_NOTHING, NEEDS_INIT, NEEDS_CONTEXT };
CUresult call_enter(const char *function, enum need need);
void call_leave(void);
void call_log(const char *function, CUresult result, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
extern bool log_queries; /* FAKE_CUDA_LOG_ALL: also the calls that change nothing */
CUresult call_initialize(void);
int driver_version(void);
int device_count(void);

/* The body of an entry point: refuse or fail as scripted, run under the lock, log name, arguments and result. */
#define CALL_(need, logged, body, ...)                                                                       \
    do {                                                                                                     \
        CUresult rc_ = call_enter(__func__, need);                                                           \
        bool entered_ = rc_ == CUDA_SUCCESS;                                                                 \
        if (entered_) rc_ = (body);                                                                          \
        if (logged) call_log(__func__, rc_, __VA_ARGS__); /* under the lock: the log is in the order of effects */ \
        if (entered_) call_leave();                                                                          \
        return rc_;                                                                                          \
    } while (0)
#define CALL(need, body, ...) CALL_(need, true, body, __VA_ARGS__)
#define QUERY(need, body) CALL_(need, log_queries, body, " ")
/* An out-parameter in a log line: 0 unless the call succeeded. */
#define OUT(p) ((rc_ == CUDA_SUCCESS && (p)) ? (unsigned long long)(uintptr_t) * (p) : 0ULL)

/* usage.c: how much of each device is used, by every process that shares FAKE_CUDA_STATE. */
int usage_state(int pid); /* CUprocessState; -1: no such process */
bool usage_change_state(int pid, int from, int to);
size_t device_total(int device);
size_t device_free(int device);
bool device_charge(int device, size_t bytes); /* false: out of memory */
void device_refund(int device, size_t bytes);
void usage_forget_in_child(void);

/* span.c: a row of equal units, each free or used. */
struct span {
    struct span *next;
    CUdeviceptr base;
    size_t unit, units, free_units;
    unsigned char *used; /* one byte per unit */
};
struct span *span_new(CUdeviceptr base, size_t bytes, size_t unit);
void span_delete(struct span *span);
/* The smallest hole of at least `units`, the lowest of equals. */
bool span_find(const struct span *span, size_t units, size_t *start, size_t *hole);
void span_take(struct span *span, size_t start, size_t units);
void span_give(struct span *span, size_t start, size_t units);
static inline size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/* space.c: which address a request gets. */
void space_note_context(void);
CUdeviceptr space_reserve(size_t bytes, size_t align, CUdeviceptr wanted); /* 0: no room */
void space_unreserve(CUdeviceptr base, size_t bytes);
CUresult space_alloc(int device, size_t bytes, CUdeviceptr *base, size_t *extent);
void space_free(int device, CUdeviceptr base, size_t extent);

/* book.c: what is allocated now, found by address. */
enum kind { LINEAR, PITCHED, MANAGED, HOST, REGISTERED, STREAM_ORDERED, IMPORTED, GRAPH_MEMORY, MODULE_DATA };
struct allocation {
    CUdeviceptr base;
    size_t bytes;  /* as asked */
    size_t extent; /* as reserved */
    enum kind kind;
    int device;
    struct context *context;
    struct pool *pool;     /* STREAM_ORDERED */
    struct span *chunk;    /* STREAM_ORDERED */
    uint64_t id;           /* never reused */
};
struct allocation *book_add(struct allocation entry);
struct allocation *book_at(CUdeviceptr address);        /* the one that contains the address */
struct allocation *book_starting_at(CUdeviceptr base);  /* the one that begins there */
void book_remove(struct allocation *entry);
void book_remove_context(struct context *context, void (*release)(struct allocation *));

/* context.c */
struct context {
    struct context *next;
    int device;
    bool primary, alive;
    unsigned references, flags;
    unsigned long long id;
    struct local_storage *storage;
};
struct context *context_current(void);
bool context_valid(struct context *context);
CUresult context_primary(int device, struct context **context); /* the handle, retained or not */
CUresult context_storage_put(struct context *, void *key, void *value, void (*destroy)(CUcontext, void *, void *));
CUresult context_storage_get(struct context *, void *key, void **value);
CUresult context_storage_delete(struct context *, void *key);
bool device_valid(CUdevice device);
void device_identity(int device, CUuuid *uuid, int *domain, int *bus, int *slot);

/* memory.c */
void memory_release(struct allocation *entry);
CUresult memory_free(CUdeviceptr address);

/* vmm.c: the map that contains the address, if any. */
bool vmm_range(CUdeviceptr address, CUdeviceptr *base, size_t *bytes, int *device);

/* pool.c */
CUresult pool_alloc(struct pool *pool, size_t bytes, CUdeviceptr *address);
CUresult pool_free(struct allocation *entry);
CUresult pool_alloc_default(size_t bytes, CUdeviceptr *address);
void pools_synchronize(void); /* unused memory above the release threshold goes back */

/* stream.c */
bool stream_capturing(CUstream stream);
struct graph *stream_graph(CUstream stream);
bool stream_valid(CUstream stream);
void streams_forget(struct context *context);

/* module.c */
struct code;
CUresult module_from_fatbin(struct code **out);

/* graph.c */
struct graph *graph_new(void);
void graph_delete(struct graph *graph);
CUresult graph_add_alloc(struct graph *graph, int device, size_t bytes, CUdeviceptr *address, CUgraphNode *node);
CUresult graph_add_free(struct graph *graph, CUdeviceptr address, CUgraphNode *node);

#endif

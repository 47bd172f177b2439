/* Streams and events. Nothing ever runs, so everything asked for has completed by the time somebody looks, but where a test makes a
 * stream busy (fakeCudaBusyUntil); FAKE_CUDA_FAIL can make a query say otherwise (cuEventQuery:1:600). A stream can capture into a
 * graph. */
#include "fake.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

typedef unsigned long long nanos; /* CLOCK_MONOTONIC, where a test does not say otherwise (fakeCudaTime) */

struct stream {
    struct stream *next;
    struct context *context;
    unsigned flags;
    int priority;
    unsigned long long id;
    struct graph *capturing;
    nanos busy; /* until then */
};
struct event {
    struct event *next;
    struct context *context;
    unsigned flags;
    bool recorded, captured;
    nanos at;
};

static struct stream *streams;
static struct event *events;
static unsigned long long next_id = 7; /* as a real driver's first stream after the default ones */

/* NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are streams that nobody creates. */
static bool built_in(CUstream stream) { return (uintptr_t)stream <= 2; }

static _Atomic nanos said; /* the time of streams, where a test says it */

static nanos now(void)
{
    struct timespec at;
    nanos is = atomic_load(&said);
    if (is) return is;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return (nanos)at.tv_sec * 1000000000u + (nanos)at.tv_nsec;
}

/* Until when the stream is busy: the past, unless a test said otherwise. */
static nanos *busy(CUstream stream)
{
    static nanos of_built_in[3];
    return built_in(stream) ? &of_built_in[(uintptr_t)stream] : &stream->busy;
}

/* When what is enqueued now begins. */
static nanos free_at(CUstream stream)
{
    nanos at = now(), until = *busy(stream);
    return at > until ? at : until;
}

bool stream_valid(CUstream stream)
{
    if (built_in(stream)) return true;
    for (struct stream *s = streams; s; s = s->next)
        if (s == stream) return true;
    return false;
}

struct graph *stream_graph(CUstream stream) { return built_in(stream) ? NULL : stream->capturing; }
bool stream_capturing(CUstream stream) { return stream_graph(stream) != NULL; }

static CUresult create(CUstream *out, unsigned flags, int priority)
{
    if (!out || flags > 1) return CUDA_ERROR_INVALID_VALUE; /* CU_STREAM_NON_BLOCKING */
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) return CUDA_ERROR_OUT_OF_MEMORY;
    *stream = (struct stream){.next = streams, .context = context_current(), .flags = flags, .priority = priority,
                              .id = next_id++};
    *out = streams = stream;
    return CUDA_SUCCESS;
}

static CUresult destroy(CUstream stream)
{
    if (built_in(stream) || !stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    struct stream **at = &streams;
    while (*at != stream) at = &(*at)->next;
    *at = stream->next;
    free(stream);
    return CUDA_SUCCESS;
}

static CUresult check(CUstream stream) { return stream_valid(stream) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }

static CUresult synchronize(CUstream stream)
{
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream_capturing(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    pools_synchronize();
    return CUDA_SUCCESS;
}

static CUresult begin_capture(CUstream stream)
{
    if (built_in(stream)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capturing) return CUDA_ERROR_INVALID_VALUE;
    stream->capturing = graph_new();
    return CUDA_SUCCESS;
}

static CUresult end_capture(CUstream stream, CUgraph *out)
{
    if (built_in(stream) || !stream_valid(stream) || !out || !stream->capturing) return CUDA_ERROR_INVALID_VALUE;
    *out = stream->capturing;
    stream->capturing = NULL;
    return CUDA_SUCCESS;
}

static CUresult capture_info(CUstream stream, int *status, cuuint64_t *id, CUgraph *graph)
{
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (!status) return CUDA_ERROR_INVALID_VALUE;
    struct graph *capturing = stream_graph(stream);
    *status = capturing != NULL; /* CU_STREAM_CAPTURE_STATUS_ACTIVE */
    if (capturing && id) *id = stream->id;
    if (capturing && graph) *graph = capturing;
    return CUDA_SUCCESS;
}

static CUresult get_flags(CUstream stream, unsigned *out)
{
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = built_in(stream) ? 0 : stream->flags;
    return CUDA_SUCCESS;
}

static CUresult get_priority(CUstream stream, int *out)
{
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = built_in(stream) ? 0 : stream->priority;
    return CUDA_SUCCESS;
}

static CUresult get_id(CUstream stream, unsigned long long *out)
{
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = built_in(stream) ? (uintptr_t)stream + 1 : stream->id;
    return CUDA_SUCCESS;
}

static CUresult get_context(CUstream stream, CUcontext *out)
{
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = built_in(stream) ? context_current() : stream->context;
    return CUDA_SUCCESS;
}

static struct event *find_event(CUevent event)
{
    for (struct event *e = events; e; e = e->next)
        if (e == event) return e;
    return NULL;
}

static CUresult event_create(CUevent *out, unsigned flags)
{
    if (!out || flags > 7) return CUDA_ERROR_INVALID_VALUE;
    struct event *event = calloc(1, sizeof *event);
    if (!event) return CUDA_ERROR_OUT_OF_MEMORY;
    event->next = events;
    event->context = context_current();
    event->flags = flags;
    *out = events = event;
    return CUDA_SUCCESS;
}

static CUresult event_destroy(CUevent event)
{
    if (!find_event(event)) return CUDA_ERROR_INVALID_HANDLE;
    struct event **at = &events;
    while (*at != event) at = &(*at)->next;
    *at = event->next;
    free(event);
    return CUDA_SUCCESS;
}

static CUresult event_record(CUevent event, CUstream stream)
{
    if (!find_event(event) || !stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    if (event->context != (built_in(stream) ? context_current() : stream->context)) return CUDA_ERROR_INVALID_HANDLE;
    event->recorded = true;
    event->captured = stream_capturing(stream);
    event->at = free_at(stream);
    return CUDA_SUCCESS;
}

static CUresult event_check(CUevent event) { return find_event(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }

static CUresult event_query(CUevent event)
{
    if (!find_event(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (event->captured) return CUDA_ERROR_CAPTURED_EVENT;
    return event->recorded && event->at > now() ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

static CUresult wait_event(CUstream stream, CUevent event)
{
    if (!stream_valid(stream) || !find_event(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (event->recorded && event->at > *busy(stream)) *busy(stream) = event->at;
    return CUDA_SUCCESS;
}

/* What belongs to a context goes with it. */
void streams_forget(struct context *context)
{
    for (struct event **at = &events; *at;) {
        struct event *event = *at;
        if (event->context != context) {
            at = &event->next;
            continue;
        }
        *at = event->next;
        free(event);
    }
}

/* For tests: the stream works on something until then, after what it works on already. */
EXPORT void fakeCudaBusyUntil(CUstream stream, nanos until)
{
    if (until > *busy(stream)) *busy(stream) = until;
}
/* For tests: the time of streams is this, and stands still until it is said anew. 0: it is CLOCK_MONOTONIC. */
EXPORT void fakeCudaTime(nanos is) { atomic_store(&said, is); }
EXPORT nanos fakeCudaNow(void) { return now(); }
/* For tests: when what is enqueued now begins. */
EXPORT nanos fakeCudaFreeAt(CUstream stream) { return free_at(stream); }

static CUresult event_synchronize(CUevent event)
{
    if (!find_event(event)) return CUDA_ERROR_INVALID_HANDLE;
    pools_synchronize();
    return CUDA_SUCCESS;
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end)
{
    if (!milliseconds) return CUDA_ERROR_INVALID_VALUE;
    if (!find_event(start) || !find_event(end)) return CUDA_ERROR_INVALID_HANDLE;
    if (!start->recorded || !end->recorded || (start->flags & 2) || (end->flags & 2)) /* CU_EVENT_DISABLE_TIMING */
        return CUDA_ERROR_INVALID_HANDLE;
    if (start->at > now() || end->at > now()) return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(long long)(end->at - start->at) * 1e-6);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
    CALL(NEEDS_CONTEXT, create(out, flags, 0), "flags=%u stream=0x%llx", flags, OUT(out));
}
EXPORT CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
    CALL(NEEDS_CONTEXT, create(out, flags, priority), "flags=%u stream=0x%llx", flags, OUT(out));
}
EXPORT CUresult cuStreamDestroy(CUstream stream) { CALL(NEEDS_CONTEXT, destroy(stream), "stream=%p", (void *)stream); }
EXPORT CUresult cuStreamDestroy_v2(CUstream stream) { CALL(NEEDS_CONTEXT, destroy(stream), "stream=%p", (void *)stream); }

/* Entry points that exist for both meanings of the default stream; to the fake they are the same. */
#define BOTH(name, parameters, body, ...)                                                                    \
    EXPORT CUresult name parameters { CALL(NEEDS_CONTEXT, body, __VA_ARGS__); }                              \
    EXPORT CUresult name##_ptsz parameters { CALL(NEEDS_CONTEXT, body, __VA_ARGS__); }
#define BOTH_QUERY(name, parameters, body)                                                                   \
    EXPORT CUresult name parameters { QUERY(NEEDS_CONTEXT, body); }                                          \
    EXPORT CUresult name##_ptsz parameters { QUERY(NEEDS_CONTEXT, body); }
BOTH(cuStreamSynchronize, (CUstream stream), synchronize(stream), "stream=%p", (void *)stream)
BOTH_QUERY(cuStreamQuery, (CUstream stream), check(stream))
BOTH_QUERY(cuStreamGetFlags, (CUstream stream, unsigned *out), get_flags(stream, out))
BOTH_QUERY(cuStreamGetPriority, (CUstream stream, int *out), get_priority(stream, out))
BOTH_QUERY(cuStreamGetId, (CUstream stream, unsigned long long *out), get_id(stream, out))
BOTH_QUERY(cuStreamGetCtx, (CUstream stream, CUcontext *out), get_context(stream, out))
BOTH_QUERY(cuStreamIsCapturing, (CUstream stream, int *status), capture_info(stream, status, NULL, NULL))
BOTH_QUERY(cuStreamGetCaptureInfo, (CUstream stream, int *status, cuuint64_t *id), capture_info(stream, status, id, NULL))
#define INFO_V2 (CUstream stream, int *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies, size_t *count)
#define INFO_V3 (CUstream stream, int *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies, \
                 const void **edges, size_t *count)
static CUresult capture_info_full(CUstream stream, int *status, cuuint64_t *id, CUgraph *graph,
                                  const CUgraphNode **dependencies, size_t *count)
{
    if (dependencies) *dependencies = NULL;
    if (count) *count = 0;
    return capture_info(stream, status, id, graph);
}
EXPORT CUresult cuStreamGetCaptureInfo_v2 INFO_V2
{
    QUERY(NEEDS_CONTEXT, capture_info_full(stream, status, id, graph, dependencies, count));
}
EXPORT CUresult cuStreamGetCaptureInfo_v2_ptsz INFO_V2
{
    QUERY(NEEDS_CONTEXT, capture_info_full(stream, status, id, graph, dependencies, count));
}
EXPORT CUresult cuStreamGetCaptureInfo_v3 INFO_V3
{
    if (edges) *edges = NULL;
    QUERY(NEEDS_CONTEXT, capture_info_full(stream, status, id, graph, dependencies, count));
}
EXPORT CUresult cuStreamGetCaptureInfo_v3_ptsz INFO_V3
{
    if (edges) *edges = NULL;
    QUERY(NEEDS_CONTEXT, capture_info_full(stream, status, id, graph, dependencies, count));
}
BOTH(cuStreamBeginCapture, (CUstream stream), begin_capture(stream), "stream=%p", (void *)stream)
EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, int mode)
{
    CALL(NEEDS_CONTEXT, begin_capture(stream), "stream=%p mode=%d", (void *)stream, mode);
}
EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode)
{
    CALL(NEEDS_CONTEXT, begin_capture(stream), "stream=%p mode=%d", (void *)stream, mode);
}
BOTH(cuStreamEndCapture, (CUstream stream, CUgraph *out), end_capture(stream, out), "stream=%p graph=0x%llx",
     (void *)stream, OUT(out))
BOTH_QUERY(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags),
           ((void)flags, wait_event(stream, event)))
BOTH(cuEventRecord, (CUevent event, CUstream stream), event_record(event, stream), "event=%p stream=%p", (void *)event,
     (void *)stream)
BOTH(cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned flags), ((void)flags, event_record(event, stream)),
     "event=%p stream=%p", (void *)event, (void *)stream)
EXPORT CUresult cuEventCreate(CUevent *out, unsigned flags)
{
    CALL(NEEDS_CONTEXT, event_create(out, flags), "flags=%u event=0x%llx", flags, OUT(out));
}
EXPORT CUresult cuEventDestroy(CUevent event) { CALL(NEEDS_CONTEXT, event_destroy(event), "event=%p", (void *)event); }
EXPORT CUresult cuEventDestroy_v2(CUevent event) { CALL(NEEDS_CONTEXT, event_destroy(event), "event=%p", (void *)event); }
EXPORT CUresult cuEventQuery(CUevent event) { QUERY(NEEDS_CONTEXT, event_query(event)); }
EXPORT CUresult cuEventSynchronize(CUevent event)
{
    CALL(NEEDS_CONTEXT, event_synchronize(event), "event=%p", (void *)event);
}
EXPORT CUresult cuEventElapsedTime(float *out, CUevent start, CUevent end) { QUERY(NEEDS_CONTEXT, elapsed(out, start, end)); }
EXPORT CUresult cuEventElapsedTime_v2(float *out, CUevent start, CUevent end)
{
    QUERY(NEEDS_CONTEXT, elapsed(out, start, end));
}
static CUresult swap_mode(int *mode)
{
    static __thread int current; /* CU_STREAM_CAPTURE_MODE_GLOBAL */
    if (!mode) return CUDA_ERROR_INVALID_VALUE;
    int old = current;
    current = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuThreadExchangeStreamCaptureMode(int *mode) { QUERY(NEEDS_INIT, swap_mode(mode)); }

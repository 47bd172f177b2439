/* Graphs, as far as their memory goes: alloc and free nodes.
 *
 * The address of an alloc node is reserved when the node is made; memory is behind it from the first launch of an executable graph
 * until a launch runs the matching free node, or the executable graph goes. */
#include "fake.h"

#include <stdlib.h>

struct graph_node {
    struct graph_node *next;
    enum { ALLOC = 10, FREE = 11, EMPTY = 5 } type; /* CUgraphNodeType, cuda.h 13.5 */
    CUdeviceptr address;
    size_t bytes;
    int device;
};
struct graph {
    struct graph *next;
    struct graph_node *nodes;
    unsigned references; /* the handle and every executable graph */
    bool destroyed;
};
struct graph_exec {
    struct graph_exec *next;
    struct graph *graph;
};

static struct graph *graphs;
static struct graph_exec *execs;
static cuuint64_t used[MAX_DEVICES], used_high[MAX_DEVICES];

struct graph *graph_new(void)
{
    struct graph *graph = calloc(1, sizeof *graph);
    if (!graph) abort();
    graph->references = 1;
    graph->next = graphs;
    return graphs = graph;
}

static bool valid(struct graph *graph)
{
    for (struct graph *g = graphs; g; g = g->next)
        if (g == graph) return !g->destroyed;
    return false;
}

/* An alloc node's entry in the book is backed once memory was charged for it; `pool` is free to say so. */
#define BACKED ((struct pool *)1)

static void unback(struct allocation *entry)
{
    if (!entry->pool) return;
    entry->pool = NULL;
    device_refund(entry->device, entry->extent);
    used[entry->device] -= entry->extent;
}

static void drop(struct graph *graph)
{
    if (--graph->references) return;
    while (graph->nodes) {
        struct graph_node *node = graph->nodes;
        graph->nodes = node->next;
        struct allocation *entry = node->type == ALLOC ? book_starting_at(node->address) : NULL;
        if (entry) {
            unback(entry);
            space_unreserve(entry->base, entry->extent);
            book_remove(entry);
        }
        free(node);
    }
    struct graph **at = &graphs;
    while (*at != graph) at = &(*at)->next;
    *at = graph->next;
    free(graph);
}

void graph_delete(struct graph *graph)
{
    graph->destroyed = true;
    drop(graph);
}

static struct graph_node *append(struct graph *graph, struct graph_node made)
{
    struct graph_node *node = malloc(sizeof *node), **at = &graph->nodes;
    if (!node) abort();
    *node = made;
    while (*at) at = &(*at)->next;
    return *at = node;
}

CUresult graph_add_alloc(struct graph *graph, int device, size_t bytes, CUdeviceptr *address, CUgraphNode *node)
{
    if (!address || !bytes) return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (bytes > device_total(device)) return CUDA_ERROR_OUT_OF_MEMORY;
    size_t extent = round_up(bytes, 2 * MIB);
    CUdeviceptr base = space_reserve(extent, 2 * MIB, 0);
    if (!base) return CUDA_ERROR_OUT_OF_MEMORY;
    book_add((struct allocation){.base = base, .bytes = bytes, .extent = extent, .kind = GRAPH_MEMORY, .device = device});
    struct graph_node *made = append(graph, (struct graph_node){.type = ALLOC, .address = base, .bytes = bytes, .device = device});
    if (node) *node = made;
    *address = base;
    return CUDA_SUCCESS;
}

CUresult graph_add_free(struct graph *graph, CUdeviceptr address, CUgraphNode *node)
{
    struct allocation *entry = book_starting_at(address);
    if (!entry || entry->kind != GRAPH_MEMORY) return CUDA_ERROR_INVALID_VALUE;
    struct graph_node *made = append(graph, (struct graph_node){.type = FREE, .address = address});
    if (node) *node = made;
    return CUDA_SUCCESS;
}

static CUresult create(CUgraph *out, unsigned flags)
{
    if (!out || flags) return CUDA_ERROR_INVALID_VALUE;
    *out = graph_new();
    return CUDA_SUCCESS;
}

static CUresult destroy(CUgraph graph)
{
    if (!valid(graph)) return CUDA_ERROR_INVALID_VALUE;
    graph_delete(graph);
    return CUDA_SUCCESS;
}

static CUresult add_alloc(CUgraphNode *node, CUgraph graph, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    if (!node || !params || !valid(graph) || params->pool_props.location.type != LOCATION_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    return graph_add_alloc(graph, params->pool_props.location.id, params->bytesize, &params->dptr, node);
}

static CUresult add_free(CUgraphNode *node, CUgraph graph, CUdeviceptr address)
{
    if (!node || !valid(graph)) return CUDA_ERROR_INVALID_VALUE;
    return graph_add_free(graph, address, node);
}

static CUresult add_empty(CUgraphNode *node, CUgraph graph)
{
    if (!node || !valid(graph)) return CUDA_ERROR_INVALID_VALUE;
    *node = append(graph, (struct graph_node){.type = EMPTY});
    return CUDA_SUCCESS;
}

static CUresult get_nodes(CUgraph graph, CUgraphNode *out, size_t *count)
{
    if (!valid(graph) || !count) return CUDA_ERROR_INVALID_VALUE;
    size_t n = 0;
    for (struct graph_node *node = graph->nodes; node; node = node->next, n++)
        if (out && n < *count) out[n] = node;
    *count = n;
    return CUDA_SUCCESS;
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph)
{
    if (!out || !valid(graph)) return CUDA_ERROR_INVALID_VALUE;
    struct graph_exec *exec = malloc(sizeof *exec);
    if (!exec) return CUDA_ERROR_OUT_OF_MEMORY;
    *exec = (struct graph_exec){execs, graph};
    graph->references++;
    *out = execs = exec;
    return CUDA_SUCCESS;
}

static bool exec_valid(CUgraphExec exec)
{
    for (struct graph_exec *e = execs; e; e = e->next)
        if (e == exec) return true;
    return false;
}

static CUresult launch(CUgraphExec exec, CUstream stream)
{
    if (!exec_valid(exec)) return CUDA_ERROR_INVALID_VALUE;
    if (!stream_valid(stream)) return CUDA_ERROR_INVALID_HANDLE;
    for (struct graph_node *node = exec->graph->nodes; node; node = node->next) {
        struct allocation *entry = node->type == EMPTY ? NULL : book_starting_at(node->address);
        if (entry && node->type == FREE) unback(entry);
        if (!entry || node->type != ALLOC || entry->pool) continue;
        if (!device_charge(entry->device, entry->extent)) return CUDA_ERROR_OUT_OF_MEMORY;
        entry->pool = BACKED;
        used[entry->device] += entry->extent;
        if (used[entry->device] > used_high[entry->device]) used_high[entry->device] = used[entry->device];
    }
    return CUDA_SUCCESS;
}

static CUresult exec_destroy(CUgraphExec exec)
{
    if (!exec_valid(exec)) return CUDA_ERROR_INVALID_VALUE;
    struct graph_exec **at = &execs;
    while (*at != exec) at = &(*at)->next;
    *at = exec->next;
    for (struct graph_node *node = exec->graph->nodes; node; node = node->next) {
        struct allocation *entry = node->type == ALLOC ? book_starting_at(node->address) : NULL;
        if (entry) unback(entry);
    }
    drop(exec->graph);
    free(exec);
    return CUDA_SUCCESS;
}

/* CUgraphMem_attribute: USED_MEM_CURRENT, USED_MEM_HIGH, RESERVED_MEM_CURRENT, RESERVED_MEM_HIGH; here reserved is used. */
static CUresult get_attribute(CUdevice device, int which, cuuint64_t *out)
{
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!out || which < 0 || which > 3) return CUDA_ERROR_INVALID_VALUE;
    *out = which % 2 ? used_high[device] : used[device];
    return CUDA_SUCCESS;
}

static CUresult set_attribute(CUdevice device, int which, const cuuint64_t *value)
{
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!value || *value || (which != 1 && which != 3)) return CUDA_ERROR_INVALID_VALUE;
    used_high[device] = used[device];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphCreate(CUgraph *out, unsigned flags) { CALL(NEEDS_INIT, create(out, flags), "graph=0x%llx", OUT(out)); }
EXPORT CUresult cuGraphDestroy(CUgraph graph) { CALL(NEEDS_INIT, destroy(graph), "graph=%p", (void *)graph); }
EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                       CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    (void)dependencies, (void)count;
    CALL(NEEDS_INIT, add_alloc(node, graph, params), "bytes=%zu ptr=0x%llx", params ? params->bytesize : 0,
         rc_ == CUDA_SUCCESS ? params->dptr : 0);
}
EXPORT CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
                                      CUdeviceptr address)
{
    (void)dependencies, (void)count;
    CALL(NEEDS_INIT, add_free(node, graph, address), "ptr=0x%llx", address);
}

/* CUgraphNodeParams: the type, then from byte 16 on what belongs to it. */
struct node_params {
    int type, reserved[3];
    union {
        CUDA_MEM_ALLOC_NODE_PARAMS alloc;
        CUdeviceptr freed;
    };
};

static CUresult add_node(CUgraphNode *node, CUgraph graph, struct node_params *params)
{
    if (!params) return CUDA_ERROR_INVALID_VALUE;
    if (params->type == ALLOC) return add_alloc(node, graph, &params->alloc);
    if (params->type == FREE) return add_free(node, graph, params->freed);
    return add_empty(node, graph);
}

#define ADD_NODE(name, ...)                                                                                        \
    EXPORT CUresult name(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, __VA_ARGS__ size_t count, \
                         struct node_params *params)                                                               \
    {                                                                                                              \
        (void)dependencies, (void)count;                                                                           \
        int type = params ? params->type : 0;                                                                      \
        CALL(NEEDS_INIT, add_node(node, graph, params),                                                            \
             type == ALLOC ? "bytes=%zu ptr=0x%llx" : type == FREE ? "bytes=%zu freed=0x%llx" : " ",               \
             type == ALLOC ? params->alloc.bytesize : 0,                                                           \
             type == FREE ? params->freed : type == ALLOC && rc_ == CUDA_SUCCESS ? params->alloc.dptr : 0);        \
    }
ADD_NODE(cuGraphAddNode, )
ADD_NODE(cuGraphAddNode_v2, __attribute__((unused)) const void *edges, )
ADD_NODE(cuGraphAddNode_v3, __attribute__((unused)) const void *edges, )

EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
    (void)dependencies, (void)count;
    CALL(NEEDS_INIT, add_empty(node, graph), " ");
}
EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *out, size_t *count)
{
    QUERY(NEEDS_INIT, get_nodes(graph, out, count));
}
EXPORT CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t length)
{
    (void)error, (void)log, (void)length;
    CALL(NEEDS_CONTEXT, instantiate(out, graph), "exec=0x%llx", OUT(out));
}
EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *error, char *log, size_t length)
{
    (void)error, (void)log, (void)length;
    CALL(NEEDS_CONTEXT, instantiate(out, graph), "exec=0x%llx", OUT(out));
}
EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    CALL(NEEDS_CONTEXT, instantiate(out, graph), "exec=0x%llx", OUT(out));
}
EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    CALL(NEEDS_CONTEXT, launch(exec, stream), "exec=%p stream=%p", (void *)exec, (void *)stream);
}
EXPORT CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
    CALL(NEEDS_CONTEXT, launch(exec, stream), "exec=%p stream=%p", (void *)exec, (void *)stream);
}
EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec) { CALL(NEEDS_INIT, exec_destroy(exec), "exec=%p", (void *)exec); }
EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    CALL(NEEDS_INIT, device_valid(device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE, "device=%d", device);
}
EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice device, int which, void *out)
{
    QUERY(NEEDS_INIT, get_attribute(device, which, out));
}
EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice device, int which, void *value)
{
    QUERY(NEEDS_INIT, set_attribute(device, which, value));
}

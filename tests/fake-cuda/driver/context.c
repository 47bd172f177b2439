/* Initialisation, devices and contexts. */
#define _GNU_SOURCE
#include "device.h"
#include "fake.h"
#include "usage.h"

#include <stdio.h>
#include <stdlib.h>

struct local_storage {
    struct local_storage *next;
    void *key, *value;
    void (*destroy)(CUcontext, void *, void *);
};

#define STACK_DEPTH 64
static __thread struct context *stack[STACK_DEPTH];
static __thread int depth;
static struct context *contexts; /* every context ever made: a stale handle is found and refused, not followed */
static struct context *primary[MAX_DEVICES];
static int alive_on[MAX_DEVICES];
static unsigned long long next_context_id = 1;

static size_t context_bytes(void) { return usage_parse_bytes(getenv("FAKE_CUDA_CONTEXT"), 0); }

bool device_valid(CUdevice device) { return device >= 0 && device < device_count(); }

struct context *context_current(void) { return depth ? stack[depth - 1] : NULL; }

bool context_valid(struct context *context)
{
    for (struct context *c = contexts; c; c = c->next)
        if (c == context) return true;
    return false;
}

static CUresult enliven(struct context *context)
{
    if (alive_on[context->device] == 0 && !device_charge(context->device, context_bytes()))
        return CUDA_ERROR_OUT_OF_MEMORY;
    alive_on[context->device]++;
    context->alive = true;
    space_note_context();
    return CUDA_SUCCESS;
}

static struct context *context_new(int device)
{
    struct context *context = calloc(1, sizeof *context);
    if (!context) abort();
    *context = (struct context){.next = contexts, .device = device, .id = next_context_id++};
    return contexts = context;
}

/* Everything that lives in a context goes with it. */
static void context_kill(struct context *context)
{
    while (context->storage) {
        struct local_storage *item = context->storage;
        context->storage = item->next;
        if (item->destroy) item->destroy(context, item->key, item->value);
        free(item);
    }
    book_remove_context(context, memory_release);
    streams_forget(context);
    context->alive = false;
    context->references = 0;
    if (--alive_on[context->device] == 0) device_refund(context->device, context_bytes());
}

CUresult context_primary(int device, struct context **context)
{
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!primary[device]) {
        primary[device] = context_new(device);
        primary[device]->primary = true;
    }
    *context = primary[device];
    return CUDA_SUCCESS;
}

static CUresult primary_retain(CUcontext *out, int device)
{
    struct context *context;
    CUresult result = out ? context_primary(device, &context) : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && !context->alive) result = enliven(context);
    if (result != CUDA_SUCCESS) return result;
    context->references++;
    *out = context;
    return CUDA_SUCCESS;
}

static CUresult primary_release(int device)
{
    struct context *context;
    CUresult result = context_primary(device, &context);
    if (result != CUDA_SUCCESS) return result;
    if (!context->alive) return CUDA_ERROR_INVALID_CONTEXT;
    if (--context->references == 0) context_kill(context);
    return CUDA_SUCCESS;
}

static CUresult primary_reset(int device)
{
    struct context *context;
    CUresult result = context_primary(device, &context);
    if (result == CUDA_SUCCESS && context->alive) context_kill(context);
    return result;
}

static CUresult create(CUcontext *out, unsigned flags, int device)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    if (depth == STACK_DEPTH) return CUDA_ERROR_INVALID_VALUE;
    struct context *context = context_new(device);
    context->flags = flags;
    CUresult result = enliven(context);
    if (result != CUDA_SUCCESS) return result;
    stack[depth++] = *out = context;
    return CUDA_SUCCESS;
}

static CUresult destroy(struct context *context)
{
    if (!context_valid(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (!context->alive) return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (context->primary) return CUDA_ERROR_INVALID_CONTEXT;
    context_kill(context);
    if (context_current() == context) depth--;
    return CUDA_SUCCESS;
}

static CUresult set_current(struct context *context)
{
    if (context && !context_valid(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == 0 && context) depth = 1;
    else if (depth && !context) depth--;
    if (context) stack[depth - 1] = context;
    return CUDA_SUCCESS;
}

static CUresult push(struct context *context)
{
    if (!context_valid(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == STACK_DEPTH) return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *out)
{
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    if (out) *out = stack[depth - 1];
    depth--;
    return CUDA_SUCCESS;
}

CUresult context_storage_put(struct context *context, void *key, void *value,
                             void (*destroy_value)(CUcontext, void *, void *))
{
    if (!context) context = context_current();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    struct local_storage *item = malloc(sizeof *item);
    if (!item) return CUDA_ERROR_OUT_OF_MEMORY;
    *item = (struct local_storage){context->storage, key, value, destroy_value};
    context->storage = item;
    return CUDA_SUCCESS;
}

CUresult context_storage_get(struct context *context, void *key, void **value)
{
    if (!context) context = context_current();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    for (struct local_storage *item = context->storage; item; item = item->next) {
        if (item->key != key) continue;
        *value = item->value;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_HANDLE;
}

CUresult context_storage_delete(struct context *context, void *key)
{
    if (!context) context = context_current();
    if (!context) return CUDA_ERROR_INVALID_CONTEXT;
    for (struct local_storage **at = &context->storage; *at; at = &(*at)->next) {
        if ((*at)->key != key) continue;
        struct local_storage *item = *at;
        *at = item->next;
        free(item);
        break;
    }
    return CUDA_SUCCESS;
}

void device_identity(int device, CUuuid *uuid, int *domain, int *bus, int *slot)
{
    int place = device_env_only() < 0 ? device : device_env_only();
    device_uuid(place, (unsigned char *)uuid->bytes);
    *domain = 0;
    *bus = device_bus(place);
    *slot = 0;
}

static CUresult put_int(int *out, int value)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = value;
    return CUDA_SUCCESS;
}

/* CUdevice_attribute, cuda.h 13.5; an H200's values where programs look at them. */
static int attribute(int which, int device)
{
    switch (which) {
    case 1: return 1024;              /* MAX_THREADS_PER_BLOCK */
    case 2: case 3: return 1024;      /* MAX_BLOCK_DIM_X, _Y */
    case 4: return 64;                /* MAX_BLOCK_DIM_Z */
    case 5: return 0x7fffffff;        /* MAX_GRID_DIM_X */
    case 6: case 7: return 65535;     /* MAX_GRID_DIM_Y, _Z */
    case 8: return 48 * 1024;         /* MAX_SHARED_MEMORY_PER_BLOCK */
    case 9: return 64 * 1024;         /* TOTAL_CONSTANT_MEMORY */
    case 10: return 32;               /* WARP_SIZE */
    case 11: return 0x7fffffff;       /* MAX_PITCH */
    case 12: return 65536;            /* MAX_REGISTERS_PER_BLOCK */
    case 13: return 1980000;          /* CLOCK_RATE */
    case 14: return 512;              /* TEXTURE_ALIGNMENT */
    case 16: return 132;              /* MULTIPROCESSOR_COUNT */
    case 19: return 1;                /* CAN_MAP_HOST_MEMORY */
    case 33: return device_bus(device); /* PCI_BUS_ID */
    case 34: return 0;                /* PCI_DEVICE_ID */
    case 36: return 3201000;          /* MEMORY_CLOCK_RATE */
    case 37: return 6144;             /* GLOBAL_MEMORY_BUS_WIDTH */
    case 38: return 60 << 20;         /* L2_CACHE_SIZE */
    case 39: return 2048;             /* MAX_THREADS_PER_MULTIPROCESSOR */
    case 40: return 3;                /* ASYNC_ENGINE_COUNT */
    case 41: return 1;                /* UNIFIED_ADDRESSING */
    case 50: return 0;                /* PCI_DOMAIN_ID */
    case 51: return 32;               /* TEXTURE_PITCH_ALIGNMENT */
    case 75: return device_env_capability() / 10; /* COMPUTE_CAPABILITY_MAJOR */
    case 76: return device_env_capability() % 10; /* COMPUTE_CAPABILITY_MINOR */
    case 78: return 1;                /* STREAM_PRIORITIES_SUPPORTED */
    case 81: return 228 * 1024;       /* MAX_SHARED_MEMORY_PER_MULTIPROCESSOR */
    case 82: return 65536;            /* MAX_REGISTERS_PER_MULTIPROCESSOR */
    case 83: return 1;                /* MANAGED_MEMORY */
    case 89: return 1;                /* CONCURRENT_MANAGED_ACCESS */
    case 91: return 1;                /* CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM */
    case 97: return 227 * 1024;       /* MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
    case 99: return 1;                /* HOST_REGISTER_SUPPORTED */
    case 102: return 1;               /* VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED */
    case 103: return 1;               /* HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED */
    case 106: return 32;              /* MAX_BLOCKS_PER_MULTIPROCESSOR */
    case 115: return 1;               /* MEMORY_POOLS_SUPPORTED */
    case 119: return 1;               /* MEMPOOL_SUPPORTED_HANDLE_TYPES: POSIX_FILE_DESCRIPTOR */
    default: return 0;
    }
}

static CUresult get_attribute(int *out, int which, CUdevice device)
{
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    return put_int(out, attribute(which, device));
}

static CUresult get_uuid(CUuuid *out, CUdevice device)
{
    int domain, bus, slot;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    device_identity(device, out, &domain, &bus, &slot);
    return CUDA_SUCCESS;
}

/* The card's, also where the device is a part of it. */
static CUresult get_card_uuid(CUuuid *out, CUdevice device)
{
    CUresult result = get_uuid(out, device);
    if (result == CUDA_SUCCESS && device_env_mig()) card_uuid(device_card(device_env_only()), (unsigned char *)out->bytes);
    return result;
}

static CUresult get_name(char *name, int length, CUdevice device)
{
    if (!name || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    device_name(name, (size_t)length);
    return CUDA_SUCCESS;
}

static CUresult pci_bus_id(char *out, int length, CUdevice device)
{
    if (!out || length <= 0) return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    snprintf(out, (size_t)length, "0000:%02x:00.0", device_bus(device));
    return CUDA_SUCCESS;
}

static CUresult by_pci_bus_id(CUdevice *out, const char *text)
{
    unsigned domain, bus, slot;
    if (!out || !text) return CUDA_ERROR_INVALID_VALUE;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) return CUDA_ERROR_INVALID_VALUE;
    if (domain || slot || !device_valid((int)bus - device_bus(0))) return CUDA_ERROR_INVALID_DEVICE;
    *out = (int)bus - device_bus(0);
    return CUDA_SUCCESS;
}

static CUresult total_memory(size_t *out, CUdevice device)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (!device_valid(device)) return CUDA_ERROR_INVALID_DEVICE;
    *out = device_total(device);
    return CUDA_SUCCESS;
}

static CUresult primary_state(CUdevice device, unsigned *flags, int *active)
{
    struct context *context;
    CUresult result = context_primary(device, &context);
    if (result != CUDA_SUCCESS) return result;
    if (flags) *flags = context->flags;
    return put_int(active, context->alive);
}

static CUresult set_primary_flags(CUdevice device, unsigned flags)
{
    struct context *context;
    CUresult result = context_primary(device, &context);
    if (result == CUDA_SUCCESS) context->flags = flags;
    return result;
}

static CUresult get_device(CUdevice *out, CUcontext context)
{
    if (!context) context = context_current();
    if (!context || !context_valid(context)) return CUDA_ERROR_INVALID_CONTEXT;
    return put_int(out, context->device);
}

static CUresult get_current(CUcontext *out)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = context_current();
    return CUDA_SUCCESS;
}

static CUresult get_id(CUcontext context, unsigned long long *out)
{
    if (!context) context = context_current();
    if (!context || !context_valid(context)) return CUDA_ERROR_INVALID_CONTEXT;
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = context->id;
    return CUDA_SUCCESS;
}

static CUresult synchronize(CUcontext context)
{
    if (context && !context_valid(context)) return CUDA_ERROR_INVALID_CONTEXT;
    pools_synchronize();
    return CUDA_SUCCESS;
}

static CUresult two_ints(int *first, int first_value, int *second, int second_value)
{
    if (first) *first = first_value;
    if (second) *second = second_value;
    return CUDA_SUCCESS;
}

static CUresult peer(int *out, CUdevice a, CUdevice b)
{
    if (!device_valid(a) || !device_valid(b)) return CUDA_ERROR_INVALID_DEVICE;
    return put_int(out, a != b);
}

static CUresult limit(size_t *out, int which)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = which == 0 ? 1024 : 8 * MIB; /* CU_LIMIT_STACK_SIZE, others */
    return CUDA_SUCCESS;
}

static CUresult flags_of(unsigned *out)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = context_current()->flags;
    return CUDA_SUCCESS;
}

static CUresult api_version(unsigned *out)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    *out = 3020;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned flags)
{
    CALL(NEEDS_NOTHING, flags ? CUDA_ERROR_INVALID_VALUE : call_initialize(), "flags=%u", flags);
}
EXPORT CUresult cuDriverGetVersion(int *out) { QUERY(NEEDS_NOTHING, put_int(out, driver_version())); }
EXPORT CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
    QUERY(NEEDS_INIT, device_valid(ordinal) ? put_int(out, ordinal) : CUDA_ERROR_INVALID_DEVICE);
}
EXPORT CUresult cuDeviceGetCount(int *out) { QUERY(NEEDS_INIT, put_int(out, device_count())); }
EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    QUERY(NEEDS_INIT, get_name(name, length, device));
}
EXPORT CUresult cuDeviceGetUuid(CUuuid *out, CUdevice device) { QUERY(NEEDS_INIT, get_card_uuid(out, device)); }
EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device) { QUERY(NEEDS_INIT, get_uuid(out, device)); }
EXPORT CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice device) { QUERY(NEEDS_INIT, total_memory(out, device)); }
EXPORT CUresult cuDeviceGetAttribute(int *out, int which, CUdevice device)
{
    QUERY(NEEDS_INIT, get_attribute(out, which, device));
}
EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    int capability = device_env_capability();
    QUERY(NEEDS_INIT, device_valid(device) ? two_ints(major, capability / 10, minor, capability % 10) : CUDA_ERROR_INVALID_DEVICE);
}
EXPORT CUresult cuDeviceGetPCIBusId(char *out, int length, CUdevice device)
{
    QUERY(NEEDS_INIT, pci_bus_id(out, length, device));
}
EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *out, const char *text) { QUERY(NEEDS_INIT, by_pci_bus_id(out, text)); }
EXPORT CUresult cuDeviceCanAccessPeer(int *out, CUdevice a, CUdevice b) { QUERY(NEEDS_INIT, peer(out, a, b)); }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    CALL(NEEDS_INIT, primary_retain(out, device), "device=%d", device);
}
EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    CALL(NEEDS_INIT, primary_release(device), "device=%d", device);
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CALL(NEEDS_INIT, primary_release(device), "device=%d", device);
}
EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) { CALL(NEEDS_INIT, primary_reset(device), "device=%d", device); }
EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    CALL(NEEDS_INIT, primary_reset(device), "device=%d", device);
}
EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags)
{
    QUERY(NEEDS_INIT, set_primary_flags(device, flags));
}
EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
    QUERY(NEEDS_INIT, set_primary_flags(device, flags));
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    QUERY(NEEDS_INIT, primary_state(device, flags, active));
}
EXPORT CUresult cuCtxCreate(CUcontext *out, unsigned flags, CUdevice device)
{
    CALL(NEEDS_INIT, create(out, flags, device), "device=%d", device);
}
EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device)
{
    CALL(NEEDS_INIT, create(out, flags, device), "device=%d", device);
}
EXPORT CUresult cuCtxCreate_v3(CUcontext *out, void *affinity, int count, unsigned flags, CUdevice device)
{
    (void)affinity, (void)count;
    CALL(NEEDS_INIT, create(out, flags, device), "device=%d", device);
}
EXPORT CUresult cuCtxCreate_v4(CUcontext *out, void *params, unsigned flags, CUdevice device)
{
    (void)params;
    CALL(NEEDS_INIT, create(out, flags, device), "device=%d", device);
}
EXPORT CUresult cuCtxDestroy(CUcontext context) { CALL(NEEDS_INIT, destroy(context), " "); }
EXPORT CUresult cuCtxDestroy_v2(CUcontext context) { CALL(NEEDS_INIT, destroy(context), " "); }
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { QUERY(NEEDS_INIT, set_current(context)); }
EXPORT CUresult cuCtxGetCurrent(CUcontext *out) { QUERY(NEEDS_INIT, get_current(out)); }
EXPORT CUresult cuCtxPushCurrent(CUcontext context) { QUERY(NEEDS_INIT, push(context)); }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) { QUERY(NEEDS_INIT, push(context)); }
EXPORT CUresult cuCtxPopCurrent(CUcontext *out) { QUERY(NEEDS_INIT, pop(out)); }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *out) { QUERY(NEEDS_INIT, pop(out)); }
EXPORT CUresult cuCtxGetDevice(CUdevice *out) { QUERY(NEEDS_CONTEXT, get_device(out, NULL)); }
EXPORT CUresult cuCtxGetDevice_v2(CUdevice *out, CUcontext context) { QUERY(NEEDS_INIT, get_device(out, context)); }
EXPORT CUresult cuCtxGetId(CUcontext context, unsigned long long *out) { QUERY(NEEDS_INIT, get_id(context, out)); }
EXPORT CUresult cuCtxGetFlags(unsigned *out) { QUERY(NEEDS_CONTEXT, flags_of(out)); }
EXPORT CUresult cuCtxGetLimit(size_t *out, int which) { QUERY(NEEDS_CONTEXT, limit(out, which)); }
EXPORT CUresult cuCtxGetApiVersion(CUcontext context, unsigned *out)
{
    (void)context;
    QUERY(NEEDS_INIT, api_version(out));
}
EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    QUERY(NEEDS_CONTEXT, two_ints(least, 0, greatest, -5));
}
EXPORT CUresult cuCtxSynchronize(void) { CALL(NEEDS_CONTEXT, synchronize(NULL), " "); }
EXPORT CUresult cuCtxSynchronize_v2(CUcontext context) { CALL(NEEDS_INIT, synchronize(context), " "); }
EXPORT CUresult cuModuleGetLoadingMode(int *out) { QUERY(NEEDS_INIT, put_int(out, 2)); /* LAZY */ }

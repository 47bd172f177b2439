/* How others find the entry points: cuGetProcAddress, and the tables of cuGetExportTable that NVIDIA's runtime asks for.
 *
 * The meaning of the tables is public through the ZLUDA project (dark_api/src/lib.rs). */
#define _GNU_SOURCE
#include "fake.h"
#include "validity.h"

#include <string.h>

enum { PLAIN, PER_THREAD };
struct export {
    const char *base;
    int version, streams;
    void *address;
};
#define X(export, base, version, streams, result) CUresult export();
#include "exports.def"
#undef X
#define X(export, base, version, streams, result) {#base, version, streams, (void *)export},
static const struct export exports[] = {
#include "exports.def"
};
#undef X

enum { FOUND, SYMBOL_NOT_FOUND, VERSION_NOT_SUFFICIENT }; /* CUdriverProcAddressQueryResult */

/* The newest ABI that is not newer than asked; of the per-thread kind if flag 2 asks for it and there is one. */
static int find(const char *symbol, int version, cuuint64_t flags, void **out)
{
    const struct export *best = NULL;
    bool known = false;
    for (size_t i = 0; i < sizeof exports / sizeof *exports; i++) {
        const struct export *row = &exports[i];
        if (strcmp(row->base, symbol) != 0 || row->version > driver_version()) continue;
        if (row->streams == PER_THREAD && !(flags & 2)) continue;
        known = true;
        if (row->version > version) continue;
        if (!best || row->version > best->version || (row->version == best->version && row->streams == PER_THREAD))
            best = row;
    }
    *out = best ? best->address : NULL;
    return best ? FOUND : known ? VERSION_NOT_SUFFICIENT : SYMBOL_NOT_FOUND;
}

static CUresult get_proc_address(const char *symbol, void **out, int version, cuuint64_t flags, int *status)
{
    if (!symbol || !out || flags > 2 || version > driver_version()) return CUDA_ERROR_INVALID_VALUE;
    int found = find(symbol, version, flags, out);
    if (status) *status = found;
    return found == FOUND || !*symbol ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **out, int version, cuuint64_t flags)
{
    QUERY(NEEDS_NOTHING, get_proc_address(symbol, out, version, flags, NULL));
}
EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, cuuint64_t flags, int *status)
{
    QUERY(NEEDS_NOTHING, get_proc_address(symbol, out, version, flags, status));
}

/* Table functions are called by the runtime outside of `CALL`; those that touch shared state go through it. */
static CUresult primary_context(CUcontext *out, CUdevice device) { QUERY(NEEDS_INIT, context_primary(device, out)); }
static CUresult storage_put(CUcontext context, void *key, void *value, void (*destroy)(CUcontext, void *, void *))
{
    QUERY(NEEDS_INIT, context_storage_put(context, key, value, destroy));
}
static CUresult storage_delete(CUcontext context, void *key) { QUERY(NEEDS_INIT, context_storage_delete(context, key)); }
static CUresult storage_get(void **value, CUcontext context, void *key)
{
    QUERY(NEEDS_INIT, context_storage_get(context, key, value));
}
static CUresult nothing(void) { return CUDA_SUCCESS; }
/* Three ways to load a fat binary; the second and third differ in the order of their arguments. */
static CUresult load_first(struct code **out, const void *fatbin)
{
    (void)fatbin;
    return module_from_fatbin(out);
}
static CUresult load_third(const void *fatbin, struct code **out)
{
    (void)fatbin;
    return module_from_fatbin(out);
}
static CUresult context_check(CUcontext context, unsigned *first, const void **second)
{
    (void)context, (void)second;
    *first = 0;
    return CUDA_SUCCESS;
}
static char hooks[2][4096];
static void hooks_first(void **out, size_t *bytes)
{
    *out = hooks[0];
    *bytes = 1024;
}
static void hooks_second(void **out, size_t *bytes)
{
    *out = hooks[1];
    *bytes = 14;
}
static CUresult validity(unsigned version, unsigned long long seconds, unsigned long long out[2]);

/* Slot 0 holds the size of the table in bytes, except where noted. */
#define SIZE(n) (void *)((n) * sizeof(void *))
#define REST (void *)nothing
static void *const runtime_table[13] = {SIZE(13), (void *)load_first, (void *)primary_context, REST, REST, REST,
                                        (void *)load_first, REST, (void *)load_third, REST, REST, REST, REST};
static void *const hooks_table[7] = {SIZE(7), REST, (void *)hooks_first, REST, REST, REST, (void *)hooks_second};
static void *const tls_table[4] = {SIZE(4), REST, REST, REST};
static void *const storage_table[4] = {(void *)storage_put, (void *)storage_delete, (void *)storage_get, REST};
static void *const checks_table[4] = {SIZE(4), REST, (void *)context_check, REST};
static void *const validity_table[3] = {SIZE(3), (void *)validity, REST};
static void *const unknown_table[8] = {SIZE(8), REST, REST, REST, REST, REST, REST, REST};

static CUresult validity(unsigned version, unsigned long long seconds, unsigned long long out[2])
{
    struct validity_question question = {
        .driver_version = (unsigned)driver_version(),
        .runtime_version = version,
        .runtime_table = runtime_table,
        .validity_table = validity_table,
        .function = (void *)validity,
        .seconds = seconds,
    };
    validity_answer(&question, device_count(), out);
    return CUDA_SUCCESS;
}

static const struct {
    unsigned char id[4]; /* the first four bytes tell the tables apart */
    void *const *table;
} tables[] = {
    {{0x6b, 0xd5, 0xfb, 0x6c}, runtime_table},  {{0xa0, 0x94, 0x79, 0x8c}, hooks_table},
    {{0x42, 0xd8, 0x5a, 0x81}, tls_table},      {{0xc6, 0x93, 0x33, 0x6e}, storage_table},
    {{0x26, 0x3e, 0x88, 0x60}, checks_table},   {{0xd4, 0x08, 0x20, 0x55}, validity_table},
    {{0x21, 0x31, 0x8c, 0x60}, unknown_table},
};

static CUresult export_table(const void **out, const CUuuid *id)
{
    if (!out || !id) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        if (memcmp(tables[i].id, id->bytes, 4) != 0) continue;
        *out = tables[i].table;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuGetExportTable(const void **out, const CUuuid *id)
{
    CALL_(NEEDS_NOTHING, log_queries, export_table(out, id), "id=%02x%02x%02x%02x", id ? id->bytes[0] & 0xff : 0,
          id ? id->bytes[1] & 0xff : 0, id ? id->bytes[2] & 0xff : 0, id ? id->bytes[3] & 0xff : 0);
}

EXPORT CUresult cuGetErrorName(CUresult error, const char **out)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    switch (error) {
    case CUDA_SUCCESS: *out = "CUDA_SUCCESS"; break;
    case CUDA_ERROR_INVALID_VALUE: *out = "CUDA_ERROR_INVALID_VALUE"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *out = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_NOT_INITIALIZED: *out = "CUDA_ERROR_NOT_INITIALIZED"; break;
    case CUDA_ERROR_NO_DEVICE: *out = "CUDA_ERROR_NO_DEVICE"; break;
    case CUDA_ERROR_INVALID_DEVICE: *out = "CUDA_ERROR_INVALID_DEVICE"; break;
    case CUDA_ERROR_INVALID_CONTEXT: *out = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case CUDA_ERROR_INVALID_HANDLE: *out = "CUDA_ERROR_INVALID_HANDLE"; break;
    case CUDA_ERROR_NOT_FOUND: *out = "CUDA_ERROR_NOT_FOUND"; break;
    case CUDA_ERROR_NOT_READY: *out = "CUDA_ERROR_NOT_READY"; break;
    case CUDA_ERROR_NOT_SUPPORTED: *out = "CUDA_ERROR_NOT_SUPPORTED"; break;
    default: *out = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorString(CUresult error, const char **out) { return cuGetErrorName(error, out); }

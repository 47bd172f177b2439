/* Resolves every row of the hook table by every route, and calls what it got, once, between two markers.
 *
 * Built by tests/routes.rs with a generated rows.h: ROWS holds one X(name, prototype, arguments) a row, BASES the names
 * that programs ask cuGetProcAddress for. Arguments: names of a route and paths of shared runtimes, in pairs. With
 * STATIC_RUNTIME only that runtime's own entry points are tried.
 *
 * One line for each call, and one for each answer that is no row; tabs between:
 *   call INDEX ROUTE OBJECT SYMBOL RESULT GIVEN      (GIVEN: the object of the function that the call gave out, or -)
 *   other ROUTE OBJECT SYMBOL
 *   none ROUTE NAME
 * Around call INDEX stand two allocations of MARK + 2 * INDEX and MARK + 2 * INDEX + 1 bytes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct ipc_handle { char bytes[64]; };
static union { char bytes[8192]; void *word; } scratch;
#define ANY (void *)(scratch.bytes + 4096)
#include "rows.h"

enum { MARK = 1 << 20 };

struct row {
    const char *name;
    void *bound;
    int (*call)(void *function);
};

#ifdef STATIC_RUNTIME
#define BOUND(name) NULL
#else
#define X(name, prototype, arguments) int name prototype;
ROWS
#undef X
#define BOUND(name) (void *)name
#endif

#define X(name, prototype, arguments) \
    static int call_##name(void *function) { return ((int (*) prototype)function) arguments; }
ROWS
#undef X
#define X(name, prototype, arguments) {#name, BOUND(name), call_##name},
static const struct row rows[] = {ROWS};
#undef X
static const char *const bases[] = {BASES};
enum { N_ROWS = sizeof rows / sizeof *rows, N_BASES = sizeof bases / sizeof *bases };
static const char *seen[N_ROWS];

static int (*alloc)(uint64_t *, size_t), (*retain)(void **, int), (*set_current)(void *), (*init)(unsigned);
static int calls;

static void need(int ok, const char *what)
{
    if (ok) return;
    fprintf(stderr, "routes: %s\n", what);
    exit(2);
}

static const char *object_of(void *address, const char **symbol)
{
    Dl_info info;
    *symbol = "-";
    if (!address || !dladdr(address, &info)) return "-";
    if (info.dli_sname && info.dli_saddr == address) *symbol = info.dli_sname;
    const char *slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}

static void mark(int number)
{
    uint64_t address;
    alloc(&address, (size_t)MARK + (size_t)number);
}

/* `route` is the same pointer for all of a route's answers. */
static void take(const char *route, const char *asked, void *function)
{
    const char *symbol, *object = object_of(function, &symbol), *ignored;
    if (!function) {
        printf("none\t%s\t%s\n", route, asked);
        return;
    }
    const struct row *row = rows;
    while (row < rows + N_ROWS && strcmp(row->name, symbol) != 0) row++;
    if (row == rows + N_ROWS) {
        printf("other\t%s\t%s\t%s\n", route, object, symbol);
        return;
    }
    if (seen[row - rows] == route) return;
    seen[row - rows] = route;
    void *context;
    init(0);
    retain(&context, 0);
    set_current(context);
    memset(&scratch, 0, sizeof scratch);
    mark(2 * calls);
    int result = row->call(function);
    mark(2 * calls + 1);
    int gives = strncmp(symbol, "cuGetProcAddress", 16) == 0 && result == 0;
    const char *given = gives ? object_of(scratch.word, &ignored) : "-";
    printf("call\t%d\t%s\t%s\t%s\t%d\t%s\n", calls++, route, object, symbol, result, given);
}

static const int versions[] = {2000,  2020,  3020,  4000,  4010,  5000,  6000,  6050,  7000,  8000,  10000, 10020, 11000, 11020,
                               11030, 11040, 12000, 12010, 12020, 12030, 12050, 12080, 13000, 13010, 13020, 13040, 13050};
enum { N_VERSIONS = sizeof versions / sizeof *versions };

#define EACH_FLAG(flags, plain, legacy, thread) ((flags) == 0 ? plain : (flags) == 1 ? legacy : thread)

/* The entry-point functions of a runtime: 11 has three parameters, later ones four, and a fourth does no harm. */
typedef int entry_point(const char *, void **, uint64_t, int *);
typedef int entry_point_by_version(const char *, void **, unsigned, uint64_t, int *);

static void runtime(const char *name, entry_point *ask, entry_point_by_version *ask_by_version)
{
    for (uint64_t flags = 0; flags < 3; flags++) {
        char route[64], *kept;
        snprintf(route, sizeof route, "%s/%d", name, (int)flags);
        kept = strdup(route);
        for (int i = 0; ask && i < N_BASES; i++) {
            void *found = NULL;
            int status = -1;
            ask(bases[i], &found, flags, &status);
            take(kept, bases[i], found);
        }
        snprintf(route, sizeof route, "%s.v/%d", name, (int)flags);
        kept = strdup(route);
        for (int i = 0; ask_by_version && i < N_BASES; i++)
            for (int v = 0; v < N_VERSIONS; v++) {
                void *found = NULL;
                int status = -1;
                ask_by_version(bases[i], &found, (unsigned)versions[v], flags, &status);
                take(kept, bases[i], found);
            }
    }
}

#ifdef STATIC_RUNTIME
entry_point cudaGetDriverEntryPoint;
entry_point_by_version cudaGetDriverEntryPointByVersion;
#endif

static void by_proc_address(void *handle)
{
    int (*v1)(const char *, void **, int, uint64_t) = dlsym(handle, "cuGetProcAddress");
    int (*v2)(const char *, void **, int, uint64_t, int *) = dlsym(handle, "cuGetProcAddress_v2");
    need(v1 && v2, "no cuGetProcAddress");
    for (uint64_t flags = 0; flags < 3; flags++)
        for (int i = 0; i < N_BASES; i++)
            for (int v = 0; v < N_VERSIONS; v++) {
                void *found = NULL, *again = NULL;
                int status = -1;
                if (v1(bases[i], &found, versions[v], flags) == 0)
                    take(EACH_FLAG(flags, "gpa1/0", "gpa1/1", "gpa1/2"), bases[i], found);
                if (v2(bases[i], &again, versions[v], flags, &status) == 0)
                    take(EACH_FLAG(flags, "gpa2/0", "gpa2/1", "gpa2/2"), bases[i], again);
                need(found == again, "the two cuGetProcAddress differ");
            }
}

int main(int argc, char **argv)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    need(handle != NULL, "no libcuda.so.1");
    init = dlsym(handle, "cuInit");
    alloc = dlsym(handle, "cuMemAlloc_v2");
    retain = dlsym(handle, "cuDevicePrimaryCtxRetain");
    set_current = dlsym(handle, "cuCtxSetCurrent");
    need(init && alloc && retain && set_current, "the driver lacks functions");
    need(init(0) == 0, "cuInit failed");
#ifdef STATIC_RUNTIME
    runtime(argv[1], cudaGetDriverEntryPoint, cudaGetDriverEntryPointByVersion);
    (void)argc, (void)by_proc_address;
#else
    for (int i = 0; i < N_ROWS; i++) {
        take("elf", rows[i].name, rows[i].bound);
        take("dlsym", rows[i].name, dlsym(handle, rows[i].name));
        take("dlvsym", rows[i].name, dlvsym(handle, rows[i].name, "libcuda.so.1"));
        take("default", rows[i].name, dlsym(RTLD_DEFAULT, rows[i].name));
        take("next", rows[i].name, dlsym(RTLD_NEXT, rows[i].name));
    }
    by_proc_address(handle);
    for (int i = 1; i + 1 < argc; i += 2) {
        void *library = dlopen(argv[i + 1], RTLD_NOW | RTLD_LOCAL);
        need(library != NULL, dlerror());
        runtime(argv[i], (entry_point *)dlsym(library, "cudaGetDriverEntryPoint"),
                (entry_point_by_version *)dlsym(library, "cudaGetDriverEntryPointByVersion"));
    }
#endif
    return 0;
}

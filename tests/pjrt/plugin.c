/* A stand-in for a plugin of PJRT. It has the table of functions as far as this project needs it, by place: those of
 * xla/pjrt/c/pjrt_c_api.h, API 0.40 to 0.116 (jaxlib 0.4.25 to the plugin of JAX 0.12). Built with -D:
 *   WORDS      how long the table says it is, in words of 8 bytes
 *   MINOR      which version it says it is
 *   NULLS      functions beyond the needed ones are null
 *   PLATFORM   what its clients say they run on
 * Its buffers lie in one arena that it takes from the driver. */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef WORDS
#define WORDS 143
#endif
#ifndef MINOR
#define MINOR 116
#endif
#ifndef PLATFORM
#define PLATFORM "cuda"
#endif

typedef struct Error { int code; char message[120]; } Error;
typedef struct Buffer { size_t bytes; int memory; bool deleted; } Buffer;
typedef struct Executable { int n_outputs; size_t output, temporary, aliased; const char *name; } Executable;
typedef uint64_t *Args;

int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *), cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemFree_v2(unsigned long long);

enum { ARENA = 64 << 20 };
static unsigned long long arena;
static size_t used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t table[WORDS > 256 ? WORDS : 256];
static char client, device, memories[2];

static Error *error(int code, const char *message)
{
    Error *made = calloc(1, sizeof *made);
    made->code = code;
    strcpy(made->message, message);
    return made;
}

static Error *exhausted(void) { return error(8, "Out of memory while trying to allocate 1073741824 bytes."); }

static Buffer *buffer(size_t bytes, int memory)
{
    pthread_mutex_lock(&lock);
    bool fits = memory == 1 || used + bytes <= ARENA;
    used += fits && memory == 0 ? bytes : 0;
    pthread_mutex_unlock(&lock);
    if (!fits)
        return NULL;
    Buffer *made = calloc(1, sizeof *made);
    made->bytes = bytes, made->memory = memory;
    return made;
}

static void drop(Buffer *it)
{
    pthread_mutex_lock(&lock);
    used -= !it->deleted && it->memory == 0 ? it->bytes : 0;
    it->deleted = true;
    pthread_mutex_unlock(&lock);
}

static void *error_destroy(Args a) { free((void *)a[2]); return NULL; }
static void *error_message(Args a) { Error *it = (Error *)a[2]; a[3] = (uint64_t)it->message; a[4] = strlen(it->message); return (void *)-1; }
static void *error_code(Args a) { *(int *)&a[3] = ((Error *)a[2])->code; return NULL; }
static void *client_create(Args a)
{
    void *context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) || cuMemAlloc_v2(&arena, ARENA))
        return error(13, "no device");
    a[8] = (uint64_t)&client;
    return NULL;
}
static void *client_destroy(Args a) { (void)a; cuMemFree_v2(arena); return NULL; }
static void *platform_name(Args a) { a[3] = (uint64_t)PLATFORM, a[4] = strlen(PLATFORM); return NULL; }
static void *compile(Args a)
{
    /* The program is the executable itself. */
    Executable *made = malloc(sizeof *made);
    memcpy(made, (void *)a[3], sizeof *made);
    a[6] = (uint64_t)made;
    return NULL;
}
static void *from_host(Args a)
{
    Buffer *made = buffer(*(size_t *)a[5], a[11] == (uint64_t)&memories[1]);
    a[14] = (uint64_t)made;
    return made ? NULL : exhausted();
}
static void *hardware_id(Args a) { *(int *)&a[3] = 0; return NULL; }
static void *memory_kind(Args a)
{
    const char *kind = a[2] == (uint64_t)&memories[0] ? "device" : "pinned_host";
    a[3] = (uint64_t)kind, a[4] = strlen(kind);
    return NULL;
}
static void *memory_devices(Args a)
{
    static void *devices[] = {&device};
    a[3] = (uint64_t)devices, a[4] = 1;
    return NULL;
}
static void *executable_destroy(Args a) { free((void *)a[2]); return NULL; }
static void *executable_name(Args a) { a[3] = (uint64_t)((Executable *)a[2])->name, a[4] = strlen((char *)a[3]); return NULL; }
static void *num_outputs(Args a) { a[3] = ((Executable *)a[2])->n_outputs; return NULL; }
static void *get_executable(Args a)
{
    a[3] = (uint64_t)memcpy(malloc(sizeof(Executable)), (void *)a[2], sizeof(Executable));
    return NULL;
}
static void *execute(Args a)
{
    Executable *it = (Executable *)a[2];
    for (size_t d = 0; d < a[5]; d++) {
        Buffer **inputs = a[4] ? ((Buffer ***)a[4])[d] : NULL, **outputs = ((Buffer ***)a[7])[d];
        /* The first argument is donated, if anything is. */
        if (it->aliased && inputs)
            drop(inputs[0]);
        for (int i = 0; i < it->n_outputs; i++)
            if (!(outputs[i] = buffer(it->output, 0)))
                return exhausted();
    }
    return NULL;
}
static void *buffer_destroy(Args a) { drop((Buffer *)a[2]); free((void *)a[2]); return NULL; }
static void *buffer_delete(Args a) { drop((Buffer *)a[2]); return NULL; }
static void *buffer_size(Args a)
{
    /* A structure of a newer release than the caller's is refused by real ones too. */
    if (a[0] < 32)
        return error(3, "too small");
    a[3] = ((Buffer *)a[2])->bytes;
    return NULL;
}
static void *buffer_memory(Args a) { a[3] = (uint64_t)&memories[((Buffer *)a[2])->memory]; return NULL; }
static void *is_deleted(Args a) { *(bool *)&a[3] = ((Buffer *)a[2])->deleted; return NULL; }
static void *copy(Args a)
{
    Buffer *made = buffer(((Buffer *)a[2])->bytes, a[3] == (uint64_t)&memories[1]);
    a[4] = (uint64_t)made;
    return made ? NULL : exhausted();
}
#ifndef NULLS
static void *view(Args a) { Buffer *made = buffer(0, 0); made->bytes = 4096; made->deleted = true; a[12] = (uint64_t)made; return NULL; }
static void *memory_stats(Args a)
{
    Executable *it = (Executable *)a[2];
    if (a[0] < 8 * 17)
        return error(3, "too small");
    a[3] = 1000, a[4] = 2000, a[5] = it->output * it->n_outputs, a[6] = it->aliased, a[7] = it->temporary;
    return NULL;
}
static void *uninitialized(Args a) { a[9] = (uint64_t)buffer(*(size_t *)a[3], 0); return a[9] ? NULL : exhausted(); }

#endif

const uint64_t *GetPjrtApi(void)
{
    struct { int place; void *(*function)(Args); } functions[] = {
        {5, error_destroy}, {6, error_message}, {7, error_code}, {15, client_create}, {16, client_destroy}, {17, platform_name},
        {25, compile}, {27, from_host}, {36, hardware_id}, {41, memory_kind}, {44, memory_devices}, {45, executable_destroy},
        {46, executable_name}, {49, num_outputs}, {55, executable_destroy}, {56, get_executable}, {60, execute}, {61, NULL},
        {63, buffer_destroy}, {69, buffer_size}, {71, buffer_memory}, {72, buffer_delete}, {73, is_deleted}, {74, copy},
#ifndef NULLS
        {97, copy}, {98, view}, {101, memory_stats}, {117, uninitialized},
#endif
    };
    table[0] = WORDS * 8;
    ((int *)&table[4])[0] = 0, ((int *)&table[4])[1] = MINOR;
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        table[functions[i].place] = (uint64_t)functions[i].function;
    return table;
}

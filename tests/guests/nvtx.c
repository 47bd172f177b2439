/* A program with NVTX in it, as the header of NVTX 3 puts it there: tables of functions that do nothing until the library
 * that NVTX_INJECTION64_PATH names has put its own into them. Marks before there is memory, and after; then what nobody
 * should pass. */
#include "../programs/api.h"
#include <dlfcn.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <wchar.h>

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message;
} attributes;
_Static_assert(sizeof(attributes) == 48, "nvtxEventAttributes_t");

enum { CORE = 1, CORE2 = 5, ASCII = 1, UNICODE = 2, REGISTERED = 3 };
static void *core[16], *core2[16], **core_table[16], **core2_table[16];

static int module_table(int module, void ****table, unsigned *size)
{
    if (module != CORE && module != CORE2) return 0;
    void **variables = module == CORE ? core : core2;
    void ***pointers = module == CORE ? core_table : core2_table;
    for (int i = 1; i < 16; i++) pointers[i] = &variables[i];
    *table = pointers;
    *size = 16;
    return 1;
}

static const void *export_table(uint32_t id)
{
    static const struct { size_t size; int (*get)(int, void ****, unsigned *); } callbacks = {sizeof callbacks, module_table};
    return id == 1 ? &callbacks : NULL;
}

static void initialise(void)
{
    const char *path = getenv("NVTX_INJECTION64_PATH");
    void *library = path ? dlopen(path, RTLD_LAZY) : NULL;
    int (*attach)(const void *(*)(uint32_t)) = library ? dlsym(library, "InitializeInjectionNvtx2") : NULL;
    int attached = attach && attach(export_table);
    fprintf(stderr, "attached %d\n", attached);
}

#define CALL(type, table, id, ...) (table[id] ? ((type)table[id])(__VA_ARGS__) : 0)
#define DO(type, table, id, ...) (table[id] ? ((type)table[id])(__VA_ARGS__) : (void)0)
typedef int level(const char *), level_ex(const attributes *), level_domain(void *, const attributes *), pop_domain(void *);
typedef uint64_t range(const char *), range_w(const wchar_t *), range_domain(void *, const attributes *);
typedef void said(const char *), said_w(const wchar_t *), said_ex(const attributes *), named(uint32_t, const char *);
typedef void ended(uint64_t), ended_domain(void *, uint64_t), marked(void *, const attributes *);
typedef void *made(const char *), *made_w(const wchar_t *), *registered(void *, const char *);

#define push(text) CALL(level *, core, 9, text)
#define pop() CALL(int (*)(void), core, 11)

static attributes message(int type, const void *text)
{
    return (attributes){.version = 3, .size = sizeof(attributes), .category = 7, .message_type = type, .message = text};
}

static void allocate(size_t bytes)
{
    CUdeviceptr memory;
    if (cuMemAlloc_v2(&memory, bytes) != 0) exit(3);
}

static void *other_thread(void *first)
{
    cuCtxSetCurrent(first);
    push("worker");
    allocate(2048);
    DO(ended *, core, 7, 1); /* the range that the first thread began */
    pop();
    return NULL;
}

int main(void)
{
    void *context;
    initialise();
    void *domain = CALL(made *, core2, 12, "loader");
    void *text = CALL(registered *, core2, 10, domain, "prefetch");
    attributes prefetch = message(REGISTERED, text);
    push("forgotten");
    pop();
    int outer = push("whole program");
    CALL(level_domain *, core2, 4, domain, &prefetch);
    uint64_t epoch = CALL(range *, core, 5, "epoch 0");
    uint64_t gone = CALL(range_w *, core, 6, L"gone");
    DO(ended *, core, 7, gone);

    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 3;
    allocate(1024);
    attributes step = message(ASCII, "step 1");
    int inner = CALL(level_ex *, core, 8, &step);
    attributes wide = message(UNICODE, L"W\u00fcrfel \U0001F3B2");
    DO(said_ex *, core, 1, &wide);
    DO(said *, core, 2, "narrow");
    DO(said_w *, core, 3, L"wide");
    DO(named *, core, 14, (uint32_t)syscall(SYS_gettid), "trainer");
    pthread_t thread;
    pthread_create(&thread, NULL, other_thread, context);
    pthread_join(thread, NULL);
    int inner_end = pop();
    CALL(pop_domain *, core2, 5, domain);
    int outer_end = pop();

    /* What nobody should pass. */
    attributes shorter = message(ASCII, (void *)16);
    shorter.size = 32;
    DO(said_ex *, core, 1, &shorter);
    shorter.size = 0;
    DO(said_ex *, core, 1, &shorter);
    attributes stranger = message(REGISTERED, (void *)4096), unknown = message(99, (void *)16);
    DO(said_ex *, core, 1, &stranger);
    DO(said_ex *, core, 1, &unknown);
    DO(said_ex *, core, 1, NULL);
    DO(said *, core, 2, NULL);
    DO(marked *, core2, 1, (void *)4096, &step);
    DO(marked *, core2, 1, (char *)domain + 8, &step);
    char long_text[2000];
    memset(long_text, 'x', sizeof long_text);
    long_text[sizeof long_text - 1] = 0;
    DO(said *, core, 2, long_text);
    int nothing = pop();
    fprintf(stderr, "levels %d %d %d %d %d, epoch %d\n", outer, inner, inner_end, outer_end, nothing, epoch != 0);
    return 0;
}

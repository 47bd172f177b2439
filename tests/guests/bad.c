/* Calls every row of the hook table with arguments that nobody should pass, in every state a process can be in, and prints
 * what each call returned and left in errno. Built with a generated bad_rows.h. */
#include "../programs/api.h"
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

struct ipc_handle { char bytes[64]; };
static union { char bytes[8192]; void *word; } scratch;
#define ANY (void *)(scratch.bytes + 4096)
#include "bad_rows.h"

#define X(name, types, ...) int name##_bad types __asm__(#name);
ROWS
#undef X

static void context(void)
{
    void *primary;
    if (cuDevicePrimaryCtxRetain(&primary, 0) == 0) cuCtxSetCurrent(primary);
}

/* Each set of arguments with everything in place, as `prepare` leaves it. */
static void all(const char *state, void (*prepare)(void))
{
#define TRY(name, set, arguments)                                                      \
    memset(&scratch, 0, sizeof scratch);                                               \
    prepare();                                                                         \
    errno = 4715;                                                                      \
    result = name##_bad arguments;                                                     \
    printf("%s %s %d returned %d errno %d\n", state, #name, set, result, errno);
#define X(name, types, first, second, third, fourth, fifth)                            \
    if (strcmp(#name, "cuInit") != 0 || prepare != nothing) {                          \
        TRY(name, 1, first) TRY(name, 2, second) TRY(name, 3, third) TRY(name, 4, fourth) TRY(name, 5, fifth) \
    } else {                                                                           \
        printf("%s %s\n\n\n\n\n", state, #name);                                       \
    }
    void nothing(void);
    int result;
    ROWS
    fflush(stdout);
}

void nothing(void) {}

static void *captured;
static void capture(void)
{
    void *graph;
    context();
    if (captured) cuStreamEndCapture(captured, &graph);
    if (!captured) cuStreamCreate(&captured, 1);
    cuStreamBeginCapture_v2(captured, 2);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOFBF, 1 << 20);
    all("before", nothing);
    fflush(stdout);
    if (fork() == 0) {
        OK(cuInit(0));
        all("child", context);
        _exit(0);
    }
    wait(NULL);
    OK(cuInit(0));
    all("bare", nothing);
    all("context", context);
    all("capture", capture);
    context();
    cuDevicePrimaryCtxReset_v2(0);
    all("reset", nothing);
    return 0;
}

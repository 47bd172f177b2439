/* A program whose memory is asked for by a function that the compiler puts into another. Its arguments, in order, are
 * what else it does: `delete` removes its own file, `replace` puts another one there, `alloc` asks, `kill` ends it. */
#include "../programs/api.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

static inline __attribute__((always_inline)) void ask(CUdeviceptr *p, size_t bytes)
{
    OK(cuMemAlloc_v2(p, bytes));
}

__attribute__((noinline)) static void load_weights(void)
{
    CUdeviceptr p;
    ask(&p, WEIGHTS);
    CHECK(p);
}

static void replace(const char *path)
{
    OK(unlink(path));
    int file = open(path, O_CREAT | O_WRONLY, 0755);
    CHECK(write(file, "#!/bin/false\n", 13) == 13);
    OK(close(file));
}

int main(int argc, char **argv)
{
    void *context;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "delete")) OK(unlink(argv[0]));
        if (!strcmp(argv[i], "replace")) replace(argv[0]);
        if (!strcmp(argv[i], "kill")) {
            /* By the test, when the recorder has looked at the process. */
            alarm(1800);
            pause();
        }
        if (!strcmp(argv[i], "alloc")) {
            OK(cuInit(0));
            OK(cuDevicePrimaryCtxRetain(&context, 0));
            OK(cuCtxSetCurrent(context));
            load_weights();
        }
    }
    return 0;
}

/* Threads make, run and destroy through a plugin of PJRT and use the driver while the process forks; children go on with the same table,
 * before and after they have a session of their own: `buffers LIBRARY COUNT`. */
#include "torture.h"

typedef uint64_t args[20];
static const uint64_t *api;

static void *call(int place, args a, int words)
{
    a[0] = 8 * (uint64_t)words;
    return ((void *(*)(uint64_t *))api[place])(a);
}

static void *from_host(size_t bytes)
{
    args a = {0};
    a[5] = (uint64_t)&bytes;
    return call(27, a, 15) ? NULL : (void *)a[14];
}

static long destroy(void *buffer)
{
    args a = {0};
    a[2] = (uint64_t)buffer;
    return call(63, a, 3) != NULL;
}

static void *program;
static long use(long n)
{
    long wrong = 0;
    for (long i = 0; i < n; i++) {
        void *input = from_host(1024), *inputs[] = {input}, *input_lists[] = {inputs}, *output = NULL, *output_lists[] = {&output};
        args a = {0};
        a[2] = (uint64_t)program, a[4] = (uint64_t)input_lists, a[5] = a[6] = 1, a[7] = (uint64_t)output_lists;
        wrong += !input || call(60, a, 10) || !output || destroy(output) || destroy(input);
    }
    return wrong;
}

static void *use_on(void *unused)
{
    (void)unused;
    long wrong = 0;
    while (!stop) wrong += use(20) + work(5), rest(2000);
    return (void *)wrong;
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    begin();
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL), *threads[3];
    if (!library) die(dlerror());
    const uint64_t *(*get)(void) = (const uint64_t *(*)(void))dlsym(library, "GetPjrtApi");
    struct { int n_outputs; size_t output, temporary, aliased; const char *name; } step = {1, 512, 4096, 0, "jit_step"};
    args client = {0}, compiled = {0};
    api = get();
    CHECK(!call(15, client, 9));
    compiled[3] = (uint64_t)&step;
    CHECK(!call(25, compiled, 7));
    program = (void *)compiled[6];
    for (int i = 0; i < 3; i++) threads[i] = start(use_on, NULL);
    long wrong = 0;
    for (int i = 0; i < atoi(argv[2]); i++) {
        pid_t child = fork();
        if (child == 0) {
            in_child();
            long bad = use(5);
            if (i % 2) bad += work(5) + use(5);
            _exit(bad ? 1 : 7);
        }
        int status = 0;
        wrong += use(3) != 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 7;
    }
    stop = 1;
    for (int i = 0; i < 3; i++) wrong += (long)join(threads[i]);
    printf("%ld wrong\n", wrong);
    return wrong != 0;
}

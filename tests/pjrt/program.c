/* Does with a plugin of PJRT what jaxlib does: loads it, asks for its table, makes, runs, donates, copies, destroys, runs out
 * of memory, in several threads, and unloads it. Prints what the plugin itself says is in use at the end of each part. */
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Executable { int n_outputs; size_t output, temporary, aliased; const char *name; } Executable;
typedef uint64_t Args[20];
static const uint64_t *api;
#define CHECK(what) do { if (!(what)) { printf("line %d: %s\n", __LINE__, #what); exit(1); } } while (0)

static void *call(int place, Args a, int words)
{
    a[0] = 8 * words;
    errno = 77;
    void *answer = ((void *(*)(uint64_t *))api[place])(a);
    CHECK(errno == 77);
    return answer;
}

static void *from_host(size_t bytes, void *memory)
{
    Args a = {0};
    a[5] = (uint64_t)&bytes, a[11] = (uint64_t)memory;
    void *error = call(27, a, 15);
    if (!error)
        return (void *)a[14];
    Args m = {0}, d = {0};
    m[2] = d[2] = (uint64_t)error;
    call(6, m, 5); /* who is answered an error asks what it says, and frees it */
    call(5, d, 3);
    return NULL;
}

static void destroy(void *buffer)
{
    Args a = {0};
    a[2] = (uint64_t)buffer;
    CHECK(!call(63, a, 3));
}

static void *compiled(Executable *program)
{
    Args a = {0};
    a[3] = (uint64_t)program;
    CHECK(!call(25, a, 7));
    return (void *)a[6];
}

static int execute(void *executable, void *input, void **outputs)
{
    void *inputs[] = {input}, *input_lists[] = {inputs}, *output_lists[] = {outputs};
    Args a = {0};
    a[2] = (uint64_t)executable, a[4] = (uint64_t)input_lists, a[5] = 1, a[6] = 1, a[7] = (uint64_t)output_lists;
    void *error = call(60, a, 10);
    if (error) {
        Args d = {0};
        d[2] = (uint64_t)error;
        call(5, d, 3);
    }
    return error != NULL;
}

static void *worker(void *unused)
{
    for (int i = 0; i < 200; i++)
        destroy(from_host(1024, NULL));
    return unused;
}

static void use(const char *path)
{
    void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(plugin);
    const uint64_t *(*get)(void) = dlsym(plugin, "GetPjrtApi");
    CHECK(get && (api = get()) && get() == api);
    printf("%zu words\n", (size_t)api[0] / 8);

    Args client = {0};
    CHECK(!call(15, client, 9) && client[8]);

    void *state = from_host(1 << 20, NULL), *kept = from_host(3 << 20, NULL);
    CHECK(state && kept);
    Executable step = {2, 1 << 20, 5 << 20, 1 << 20, "jit_step"}, forward = {1, 2 << 20, 7 << 20, 0, "jit_forward"};
    void *loaded = compiled(&step), *pure = compiled(&forward);
    for (int i = 0; i < 3; i++) {
        void *outputs[2];
        CHECK(!execute(loaded, state, outputs)); /* takes the state over, and gives the next and a loss */
        destroy(state);
        destroy(outputs[1]);
        state = outputs[0];
    }
    void *result;
    CHECK(!execute(pure, kept, &result));
    Args copied = {0};
    copied[2] = (uint64_t)result;
    CHECK(!call(74, copied, 5));
    Args gone = {0};
    gone[2] = (uint64_t)result;
    CHECK(!call(72, gone, 3)); /* deleted first, destroyed later */
    destroy(result);

    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_create(&threads[i], NULL, worker, NULL));
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_join(threads[i], NULL));

    CHECK(!from_host((size_t)1 << 30, NULL));
    Executable large = {1, (size_t)1 << 30, 0, 0, "jit_large"};
    void *outputs[1];
    CHECK(execute(compiled(&large), kept, outputs));

    Args end = {0};
    end[2] = client[8];
    CHECK(!call(16, end, 3));
    CHECK(!dlclose(plugin));
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        use(argv[i]);
    return 0;
}

/* Threads use NVSHMEM's heap and the driver while the process forks, and children use the heap too, before and after they have a
 * session of their own; then its library goes and comes back: `heaps LIBRARY COUNT`. */
#include "torture.h"

static void *(*heap_malloc)(size_t);
static void (*heap_free)(void *);
static long (*heap_balance)(void);

static void *load(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) die(dlerror());
    heap_malloc = (void *(*)(size_t))dlsym(library, "nvshmem_malloc");
    heap_free = (void (*)(void *))dlsym(library, "nvshmem_free");
    heap_balance = (long (*)(void))dlsym(library, "nvshmem_balance");
    return library;
}

static long use(long n)
{
    long wrong = 0;
    for (long i = 0; i < n; i++) {
        void *p = heap_malloc(64);
        wrong += p == NULL;
        heap_free(p);
    }
    return wrong + (heap_malloc(0) != NULL);
}

static void *use_on(void *unused)
{
    (void)unused;
    while (!stop) use(20), work(5), rest(2000);
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    begin();
    void *library = load(argv[1]), *threads[3];
    for (int i = 0; i < 3; i++) threads[i] = start(use_on, NULL);
    int wrong = 0;
    for (int i = 0; i < atoi(argv[2]); i++) {
        pid_t child = fork();
        if (child == 0) {
            in_child();
            long bad = use(5);
            if (i % 2) work(5), bad += use(5);
            _exit(bad ? 1 : 7);
        }
        int status = 0;
        wrong += use(3) != 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 7;
    }
    stop = 1;
    for (int i = 0; i < 3; i++) join(threads[i]);
    long balance = heap_balance();
    CHECK(dlclose(library) == 0);
    library = load(argv[1]);
    wrong += use(10) != 0;
    printf("%d wrong, %ld left, then %ld\n", wrong, balance, heap_balance());
    return wrong != 0;
}

/* Libraries that come and go while their code stands on the stacks of allocating threads: `plugins LIBRARY TURNS`. Each of three threads
 * loads its own copy, calls the driver through it, and unloads it; what comes to the same address next is another copy. */
#include "torture.h"

static const char *library;
static int turns;
static void once(void *unused)
{
    (void)unused;
    work(1);
}
static void copy(const char *to)
{
    char buffer[1 << 16];
    int from = open(library, O_RDONLY), file = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0700);
    for (ssize_t n; (n = read(from, buffer, sizeof buffer)) > 0;)
        if (write(file, buffer, (size_t)n) != n) die(to);
    close(from);
    close(file);
}
static void *thread(void *number)
{
    char path[4200];
    snprintf(path, sizeof path, "%s/plugin.%ld.so", getenv("TORTURE_FOLDER"), (long)number);
    copy(path);
    for (int i = 0; i < turns; i++) {
        void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!plugin) return (void *)1;
        void (*through)(void (*)(void *), void *, int) = (void (*)(void (*)(void *), void *, int))dlsym(plugin, "through");
        for (int k = 0; k < 10; k++) through(once, NULL, k % 5);
        dlclose(plugin);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    library = argv[1];
    turns = atoi(argv[2]);
    begin();
    void *threads[3];
    long failed = 0;
    for (long i = 0; i < 3; i++) threads[i] = start(thread, (void *)i);
    for (int i = 0; i < 3; i++) failed += (long)join(threads[i]);
    printf("%d turns, %ld failed\n", turns, failed);
    return 0;
}

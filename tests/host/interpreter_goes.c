/* A program that runs Python for a while: loads the library that is named, runs a script that calls back, ends Python,
 * unloads the library, and goes on allocating, here and in a thread that allocates all the time; then once more. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

typedef unsigned long long address;
int cuMemAlloc_v2(address *at, size_t bytes);
int cuMemFree_v2(address at);

static volatile int is_over;

int pair(size_t bytes)
{
    address at;
    return cuMemAlloc_v2(&at, bytes) || cuMemFree_v2(at);
}

static void *work(void *unused)
{
    while (!is_over)
        pair(512);
    return unused;
}

static unsigned long where_it_is(const char *name)
{
    char line[4096];
    unsigned long start = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (!start && maps && fgets(line, sizeof line, maps))
        if (strstr(line, name))
            sscanf(line, "%lx", &start);
    if (maps)
        fclose(maps);
    return start;
}

int main(int n, char **names)
{
    pthread_t worker;
    if (n < 2 || pair(4096))
        return 2;
    pthread_create(&worker, 0, work, 0);
    for (int round = 1; round <= 2; round++) {
        char script[256];
        void *library = dlopen(names[1], RTLD_NOW | RTLD_GLOBAL);
        if (!library)
            return 3;
        void (*begin)(int) = (void (*)(int))dlsym(library, "Py_InitializeEx");
        int (*run)(const char *) = (int (*)(const char *))dlsym(library, "PyRun_SimpleString");
        int (*end)(void) = (int (*)(void))dlsym(library, "Py_FinalizeEx");
        begin(0);
        snprintf(script, sizeof script, "import ctypes\ndef asks(): ctypes.CDLL(None).pair(ctypes.c_size_t(%d))\nasks()\n",
                 round << 20);
        int failed = run(script);
        failed |= end();
        failed |= pair(8192);
        failed |= dlclose(library);
        /* A module's library may hold it. */
        printf("%d %s\n", failed, where_it_is("libpython") ? "still there" : "gone");
        fflush(stdout);
        failed |= pair(16384);
    }
    is_over = 1;
    pthread_join(worker, 0);
    puts("end");
    return 0;
}

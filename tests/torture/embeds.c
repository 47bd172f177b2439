/* A program that embeds Python as a plugin: loads libpython, runs code, ends the interpreter, unloads the library, goes on allocating, and
 * loads it again: `embeds TURNS [first]`. Other threads allocate all the while. */
#include "torture.h"

static int is_mapped(void)
{
    char line[512];
    int found = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) found |= strstr(line, "libpython") != NULL;
    if (maps) fclose(maps);
    return found;
}

int main(int argc, char **argv)
{
    char path[4096] = "";
    int turns = argc > 1 ? atoi(argv[1]) : 2;
    long failed = 0;
    FILE *asked = popen("unset LD_PRELOAD; python3 -c 'import sysconfig as s; print(s.get_config_var(\"LIBDIR\") + \"/\" + s.get_config_var(\"INSTSONAME\"))' 2>/dev/null", "r");
    if (!asked || !fgets(path, sizeof path, asked)) path[0] = 0;
    if (asked) pclose(asked);
    path[strcspn(path, "\n")] = 0;
    if (access(path, R_OK) || !strstr(path, ".so")) {
        fprintf(stderr, "launch: skip: python3 has no shared library\n");
        return 125;
    }
    /* What finds Python at the first call knows it from then on; what comes later is another matter. */
    int comes_first = argc > 2 && !strcmp(argv[2], "first");
    void *thread = NULL;
    if (!comes_first) begin(), thread = start(work_on, (void *)200L);
    for (int i = 0; i < turns; i++) {
        void *python = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
        if (!python) die(dlerror());
        /* Without `site`, which loads modules that keep the library. */
        int *no_site = (int *)dlsym(python, "Py_NoSiteFlag");
        if (no_site) *no_site = 1;
        ((void (*)(int))dlsym(python, "Py_InitializeEx"))(0);
        if (comes_first && i == 0) begin(), thread = start(work_on, (void *)200L);
        failed += ((int (*)(const char *))dlsym(python, "PyRun_SimpleString"))("x = sum(range(1000))");
        failed += work(50);
        failed += ((int (*)(void))dlsym(python, "Py_FinalizeEx"))();
        failed += work(50);
        dlclose(python);
        if (is_mapped()) fprintf(stderr, "still mapped\n");
        failed += work(50);
        rest(5000);
    }
    stop = 1;
    join(thread);
    printf("%d turns, %ld failed\n", turns, failed);
    return 0;
}

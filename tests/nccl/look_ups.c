/* What dlsym answers for functions of NCCL, with and without libgputrace.so: each line must be the same. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

extern int ncclCommShrink(void) __attribute__((weak));

static void look(const char *what, void *handle, const char *name)
{
    dlerror();
    void *found = dlsym(handle, name);
    printf("%s %s: %s, %s\n", what, name, found ? "there" : "absent", dlerror() ? "an error" : "no error");
}

int main(int n, char **arguments)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *self = dlopen(NULL, RTLD_NOW), *memory;
    look("default", RTLD_DEFAULT, "ncclAllReduce");
    look("self", self, "ncclAllReduce");
    look("driver", driver, "ncclAllReduce");
    look("driver", driver, "pncclAllReduce");
    look("next", RTLD_NEXT, "ncclNoSuchFunction");
    if (n < 3) return 0;

    /* Two libraries at once: what comes from one goes back to that one. */
    int (*allocate[2])(void **, size_t), (*release[2])(void *);
    void *library[2];
    for (int i = 0; i < 2; i++) {
        library[i] = dlopen(arguments[1 + i], RTLD_NOW | RTLD_LOCAL);
        if (!library[i]) return printf("%s\n", dlerror()), 1;
        allocate[i] = (int (*)(void **, size_t))dlsym(library[i], "ncclMemAlloc");
        release[i] = (int (*)(void *))dlsym(library[i], "ncclMemFree");
        look("library", library[i], "ncclAllReduce");
        look("library", library[i], "ncclNoSuchFunction");
    }
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*set)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    void *context;
    printf("context %d\n", init(0) || retain(&context, 0) || set(context));
    for (int i = 0; i < 2; i++) {
        printf("library %d allocates: %d\n", i, allocate[i](&memory, 1 << 21));
        printf("the other frees: %d\n", release[1 - i](memory));
        printf("itself frees: %d\n", release[i](memory));
    }
    return 0;
}

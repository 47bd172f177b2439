/* Loads and unloads the libraries that are named, in turn, and calls each; says how often one came to where another was. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);

int main(int n, char **names)
{
    void *context, *before = 0;
    int at_same_place = 0;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        return 2;
    for (int round = 0; round < 50; round++)
        for (int i = 1; i < n; i++) {
            void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
            int (*go)(void) = library ? (int (*)(void))dlsym(library, "go") : 0;
            if (!go || go())
                return 3;
            at_same_place += (void *)go == before;
            before = (void *)go;
            dlclose(library);
        }
    printf("%s\n", at_same_place == 50 * (n - 1) - 1 ? "always at the same place" : "moved");
    return 0;
}

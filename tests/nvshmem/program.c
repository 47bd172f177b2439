/* Uses the symmetric heap: linked against the library, or asked for by dlsym (argument: its file). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

extern int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);

#ifdef LINKED
extern void *nvshmem_malloc(size_t), *nvshmem_calloc(size_t, size_t), *nvshmem_align(size_t, size_t);
extern void nvshmem_free(void *);
extern size_t nvshmem_used(void);
#endif

int main(int n, char **arguments)
{
    void *context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    /* Nobody has it yet, or the one that is linked has. */
    int is_there = dlsym(RTLD_DEFAULT, "nvshmem_malloc") != NULL;
#ifdef LINKED
    (void)n, (void)arguments;
#else
    void *library = n > 1 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (library == NULL) return 2;
    void *(*nvshmem_malloc)(size_t) = dlsym(library, "nvshmem_malloc");
    void *(*nvshmem_calloc)(size_t, size_t) = dlsym(library, "nvshmem_calloc");
    void *(*nvshmem_align)(size_t, size_t) = dlsym(library, "nvshmem_align");
    void (*nvshmem_free)(void *) = dlsym(library, "nvshmem_free");
    size_t (*nvshmem_used)(void) = dlsym(library, "nvshmem_used");
#endif
    char *a = nvshmem_malloc(8 << 20), *b = nvshmem_calloc(2, 1 << 20), *c = nvshmem_align(4096, 512);
    nvshmem_free(a);
    nvshmem_free(NULL);
    void *zero = nvshmem_malloc(0), *much = nvshmem_malloc(1 << 30);
    printf("%d %ld %ld %p %p %zu\n", is_there, (long)(b - a), (long)(c - a), zero, much, nvshmem_used());
    return 0;
}

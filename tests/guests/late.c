/* Asks for memory below a few functions, then through a library that was loaded since. With LIBRARY it is that library. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>

#ifdef LIBRARY
__attribute__((noinline)) int through(int (*ask)(size_t), size_t bytes)
{
    volatile char room[100];
    room[0] = 0;
    return ask(bytes) + room[0];
}
#else
int cuInit(unsigned flags);
int cuMemAlloc_v2(unsigned long long *out, size_t bytes);

__attribute__((noinline)) static int inner(size_t bytes)
{
    volatile unsigned long long out[2];
    return cuMemAlloc_v2((unsigned long long *)out, bytes) + (out[0] == 0);
}

__attribute__((noinline)) static int outer(size_t bytes)
{
    volatile char room[200];
    room[0] = 0;
    return inner(bytes) + room[0];
}

int main(int argc, char **argv)
{
    if (cuInit(0) || outer(4096)) return 1;
    void *library = dlopen(argv[argc - 1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
    int (*through)(int (*)(size_t), size_t) = (int (*)(int (*)(size_t), size_t))dlsym(library, "through");
    return through(inner, 8192);
}
#endif

/* A preload that limits device memory, as GPU sharing tools do: no request above 1 GiB. It says at the end how many
 * requests passed by. Three makes of it:
 *   HANDLE: exports cuMemAlloc_v2, and finds the real one with dlsym(handle)
 *   NEXT:   exports cuMemAlloc_v2, and finds the real one with dlsym(RTLD_NEXT)
 *   DLSYM:  stands in for dlsym, as an ordinary function, and for what dlsym and cuGetProcAddress_v2 would answer */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef unsigned long long address;
typedef int alloc_function(address *, size_t);
typedef int proc_function(const char *, void **, int, unsigned long long, int *);
static unsigned passed;

#ifdef DLSYM
static void *(*real_dlsym(void))(void *, const char *)
{
    static void *(*real)(void *, const char *);
    if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    return real;
}
static void *real_function(const char *name) { return real_dlsym()(dlopen("libcuda.so.1", RTLD_NOW), name); }
#elif defined NEXT
static void *real_function(const char *name) { return dlsym(RTLD_NEXT, name); }
#else
static void *real_function(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); }
#endif

#ifdef HIDDEN
static
#endif
int cuMemAlloc_v2(address *out, size_t bytes)
{
    passed++;
    if (bytes > 1UL << 30) return 2;
    return ((alloc_function *)real_function("cuMemAlloc_v2"))(out, bytes);
}

#ifdef DLSYM
static int get_proc_address(const char *name, void **out, int version, unsigned long long flags, int *status)
{
    int result = ((proc_function *)real_function("cuGetProcAddress_v2"))(name, out, version, flags, status);
    if (result == 0 && strcmp(name, "cuMemAlloc") == 0) *out = cuMemAlloc_v2;
    return result;
}
void *dlsym(void *handle, const char *name)
{
    if (strcmp(name, "cuMemAlloc_v2") == 0) return cuMemAlloc_v2;
    if (strcmp(name, "cuGetProcAddress_v2") == 0) return get_proc_address;
    return real_dlsym()(handle, name);
}
#endif

__attribute__((destructor)) static void say(void)
{
    if (passed) fprintf(stderr, "limiter: %u\n", passed);
}

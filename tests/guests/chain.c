/* One of two libraries that each define foo and ompt_start_tool, and call the next one's. */
#define _GNU_SOURCE
#include <dlfcn.h>

int foo(void)
{
    int (*next)(void) = dlsym(RTLD_NEXT, "foo");
    return next == foo ? -1000 : ME + (next ? 10 * next() : 0);
}
void *ompt_start_tool(unsigned version, const char *runtime)
{
    void *(*next)(unsigned, const char *) = dlsym(RTLD_NEXT, "ompt_start_tool");
    return next ? next(version, runtime) : 0;
}
__attribute__((constructor)) static void begin(void) { ompt_start_tool(1, "test"); }

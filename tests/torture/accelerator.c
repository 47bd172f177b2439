/* A plugin of PJRT as in ../pjrt/plugin.c, whose arena is none of the driver's, and which may be used in a forked child. */
#define cuMemAlloc_v2 arena_alloc
#define cuMemFree_v2 arena_free
#include "../pjrt/plugin.c"

int arena_alloc(unsigned long long *out, size_t bytes) { return *out = 1, bytes ? 0 : 1; }
int arena_free(unsigned long long at) { return at ? 0 : 1; }

static void take_lock(void) { pthread_mutex_lock(&lock); }
static void leave_lock(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void prepare(void) { pthread_atfork(take_lock, leave_lock, leave_lock); }

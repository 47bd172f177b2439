/* A preload that stands in for functions of the C library and counts who calls them, as libjsig, sanitizers, profilers and tracers do. What it
 * counts beside a library that harms nobody is what it counts without: that library calls nothing that others can stand in for. */
extern void *dlsym(void *, const char *);
extern int dprintf(int, const char *, ...);
#define RTLD_NEXT ((void *)-1L)

/* All of them take and return what fits in registers. */
typedef long any(long, long, long, long, long, long);
#define COUNTED(X) \
    X(sigaction) X(signal) X(sigprocmask) X(pthread_sigmask) X(sigfillset) X(sigemptyset) X(close) X(dup2) X(open) X(unlink) X(mmap) X(munmap) \
    X(madvise) X(mprotect) X(getpid) X(waitpid) X(setsid) X(flock) X(fstatfs) X(posix_fallocate) X(dl_iterate_phdr) \
    X(clock_gettime) X(process_vm_readv) X(nanosleep) X(sched_yield) X(pthread_attr_init) X(sched_setaffinity)
#define STAND_IN(name) \
    static unsigned long n_##name; \
    long name(long a, long b, long c, long d, long e, long f) \
    { \
        static any *next; \
        if (!next) next = (any *)dlsym(RTLD_NEXT, #name); \
        __atomic_fetch_add(&n_##name, 1, __ATOMIC_RELAXED); \
        return next(a, b, c, d, e, f); \
    }
COUNTED(STAND_IN)

/* After every other library's end. */
__attribute__((destructor(101))) static void tell(void)
{
#define TELL(name) if (n_##name) dprintf(1, "%s %lu\n", #name, n_##name);
    COUNTED(TELL)
}

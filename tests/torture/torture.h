/* What every program of the torture shares: the driver's functions, and a page of shared memory on which each thread says what it
 * asked of the driver and what came back. The page outlives the program, however that ends, so the test knows the truth.
 *
 * Each thread (and each signal handler) has a line of its own. Its n-th request is for `line << 32 | n` bytes, and the driver
 * (driver.c) makes the address of the size: a torn record, a lost one and one that was recorded twice all show in the trace. */
#ifndef TORTURE_H
#define TORTURE_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#ifndef __cplusplus
#include <stdatomic.h>
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long counter;
#define ADD(at) __atomic_fetch_add(&(at), 1, __ATOMIC_SEQ_CST)
#ifdef __cplusplus
extern "C" {
#endif

typedef unsigned long long address;
#ifdef BY_DLOPEN
static int (*cuInit)(unsigned);
static int (*cuDevicePrimaryCtxRetain)(void **, int);
static int (*cuCtxSetCurrent)(void *);
static int (*cuMemAlloc_v2)(address *, size_t);
static int (*cuMemFree_v2)(address);
#else
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(address *, size_t);
int cuMemFree_v2(address);
#endif

/* Calls asked for, and calls that came back. traces.rs reads the same layout. */
struct line {
    counter requests, asked, completed, process;
};
#define MAX_LINES (1 << 18)
struct page {
    counter next, padding[7];
    struct line lines[MAX_LINES];
};
static struct page *page;
static __thread struct line *own;

static void die(const char *what)
{
    fprintf(stderr, "torture: %s: %s\n", what, strerror(errno));
    _exit(99);
}

/* The page, mapped. Maps it before anything else can go wrong; after exec it is mapped anew. */
static void open_page(void)
{
    const char *path = getenv("TORTURE_PAGE");
    int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0) die("TORTURE_PAGE");
    void *at = mmap(NULL, sizeof(struct page), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) die("mmap of TORTURE_PAGE");
    page = (struct page *)at;
    close(file);
    if (getenv("TORTURE_UNDUMPABLE")) prctl(PR_SET_DUMPABLE, 0);
}

/* Calls on this line may interrupt the driver itself, where they look like calls that the driver makes: the trace need not have them. */
#define ASIDE (1UL << 63)
static struct line *new_line(void)
{
    counter number = ADD(page->next);
    if (number >= MAX_LINES) die("too many lines");
    page->lines[number].process = (counter)getpid();
    return &page->lines[number];
}

static struct line *here(void)
{
    if (!own) own = new_line();
    return own;
}

/* In the child of a fork: its line is not its parent's. */
__attribute__((unused)) static void in_child(void) { own = NULL; }

/* Asks for memory; 0 if that was refused. */
__attribute__((unused)) static address take_on(struct line *line)
{
    address p = 0;
    counter number = (counter)(line - page->lines) + 1, n = ADD(line->requests) + 1;
    ADD(line->asked);
    int result = cuMemAlloc_v2(&p, number << 32 | n);
    ADD(line->completed);
    return result ? 0 : p;
}

__attribute__((unused)) static int give_on(struct line *line, address p)
{
    ADD(line->asked);
    int result = cuMemFree_v2(p);
    ADD(line->completed);
    return result;
}

__attribute__((unused)) static address take(void) { return take_on(here()); }
__attribute__((unused)) static int give(address p) { return give_on(here(), p); }

/* Takes and gives back `n` times; how many of these calls failed. */
__attribute__((unused)) static long work(long n)
{
    long failed = 0;
    for (long i = 0; i < n; i++) {
        address p = take();
        if (p) failed += give(p) != 0;
        else failed++;
    }
    return failed;
}

static void *context;
/* The page and the driver's context. A forked child makes its own before it uses CUDA. */
__attribute__((unused)) static void begin(void)
{
    open_page();
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) die("no driver");
}

static void *thread_of(void *(*function)(void *), void *argument, size_t stack) __attribute__((unused));
static void *thread_of(void *(*function)(void *), void *argument, size_t stack)
{
    pthread_attr_t attributes;
    pthread_t *thread = (pthread_t *)malloc(sizeof *thread);
    pthread_attr_init(&attributes);
    if (stack) pthread_attr_setstacksize(&attributes, stack);
    int error = pthread_create(thread, &attributes, function, argument);
    if (error) errno = error, die("pthread_create");
    pthread_attr_destroy(&attributes);
    return thread;
}
__attribute__((unused)) static void *start(void *(*function)(void *), void *argument)
{
    return thread_of(function, argument, 0);
}
__attribute__((unused)) static void *join(void *thread)
{
    void *result = NULL;
    pthread_join(*(pthread_t *)thread, &result);
    free(thread);
    return result;
}

__attribute__((unused)) static void rest(long us)
{
    struct timespec left = {us / 1000000, us % 1000000 * 1000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {}
}
/* A thread that works until the process ends, or `stop` is set: at full speed at first, and then at a pace that a recorder can follow on a
 * machine that is busy. */
static volatile int stop;
__attribute__((unused)) static void *work_on(void *pause_us)
{
    for (long i = 0; !stop; i++) {
        work(10);
        if (pause_us) rest(i < 1000 ? (long)pause_us : 10000);
    }
    return NULL;
}

#define CHECK(what) ((what) ? (void)0 : (void)printf("%s:%d: not so: %s\n", __FILE_NAME__, __LINE__, #what))
#ifndef __FILE_NAME__
#define __FILE_NAME__ "program"
#endif
#ifdef __cplusplus
}
#endif
#endif

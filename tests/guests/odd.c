/* Programs that do what is rarely done, by the name in the first argument. Each prints what it got. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long address;
static int (*init)(unsigned), (*alloc)(address *, size_t), (*release)(address);
static int (*retain)(void **, int), (*set_current)(void *);
static void *driver, *context;

static void load(void)
{
    driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    init = dlsym(driver, "cuInit");
    alloc = dlsym(driver, "cuMemAlloc_v2");
    release = dlsym(driver, "cuMemFree_v2");
    retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    set_current = dlsym(driver, "cuCtxSetCurrent");
    printf("init %d\n", init(0));
    if (retain && retain(&context, 0) == 0) printf("current %d\n", set_current(context));
}

/* Signals that interrupt hooks, and call the same functions. */
static volatile sig_atomic_t handled;
static void on_signal(int signal)
{
    address p = 0;
    int saved = errno;
    (void)signal;
    errno = 4711;
    alloc(&p, 777);
    release(p);
    if (errno != 4711) write(2, "errno changed\n", 14);
    errno = saved;
    handled++;
}
static void signals(void)
{
    struct itimerval each = {{0, 1000}, {0, 1000}};
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    load();
    sigaction(SIGPROF, &action, NULL);
    setitimer(ITIMER_PROF, &each, NULL);
    for (long i = 0; i < 10000000000 && handled < 600; i++) {
        address p = 0;
        errno = 4712;
        if (alloc(&p, 4096) || release(p) || errno != 4712) printf("wrong at %ld: %d\n", i, errno);
        /* Some work of the program's own: the recorder is to keep up. */
        for (volatile int work = 0; work < 2000; work++) {}
    }
    memset(&each, 0, sizeof each);
    setitimer(ITIMER_PROF, &each, NULL);
    printf("handled %d\n", handled >= 600);
    fprintf(stderr, "signals: %d\n", (int)handled);
}

/* Memory given back when a thread ends, after its last line. */
static pthread_key_t key;
static void at_thread_exit(void *p)
{
    if (release((address)p)) printf("free failed\n");
    address again = 0;
    alloc(&again, 8192);
    release(again);
}
static void *thread(void *unused)
{
    address p = 0;
    set_current(context);
    alloc(&p, 4096);
    pthread_setspecific(key, (void *)p);
    return unused;
}
static void threads(void)
{
    load();
    pthread_key_create(&key, at_thread_exit);
    for (int i = 0; i < 200; i++) {
        pthread_t id;
        pthread_create(&id, NULL, thread, NULL);
        pthread_join(id, NULL);
    }
    printf("done\n");
}

/* dlerror and errno are the program's own. */
static void errors(void)
{
    address p = 0;
    load();
    errno = 4713;
    const char *first = (dlsym(driver, "cuNoSuchFunction"), dlerror());
    printf("%s\n", first && strstr(first, "cuNoSuchFunction") ? "named" : "not named");
    printf("then %s\n", dlerror() ? "again" : "nothing");
    dlsym(driver, "cuMemNoSuchAlloc"), dlsym(NULL, "cuMemAllocNever");
    alloc(&p, 4096);
    printf("%s\n", dlerror() ? "kept" : "lost");
    errno = 4713;
    for (const char **name = (const char *[]){"cuMemAlloc_v2", "cuGetProcAddress_v2", "cuMemAlloc", "cuInit", NULL}; *name; name++)
        printf("%s %s errno %d error %s\n", *name, dlsym(driver, *name) ? "found" : "absent", errno, dlerror() ? "yes" : "no");
    errno = 4714;
    release(p);
    printf("errno %d\n", errno);
    printf("versioned %s, %s\n", dlvsym(driver, "cuMemAlloc_v2", "CUDA_1") ? "found" : "absent",
           dlvsym(driver, "cuMemAlloc_v2", "CUDA_9") ? "found" : "absent");
    dlerror();
    if (dlvsym(driver, "cuMemAlloc_v2", "CUDA_1")) {
        alloc = dlvsym(driver, "cuMemAlloc_v2", "CUDA_1");
        alloc(&p, 123);
    }
}

/* A child of a process that used CUDA cannot use it; a vfork child shares our memory. */
static void forked(void)
{
    address p = 0, q = 0;
    load();
    printf("alloc %d\n", alloc(&p, 4096));
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        int results[] = {alloc(&q, 4096), release(p), init(0), alloc(&q, 0), alloc(NULL, 1)};
        for (int i = 0; i < 5; i++) printf("child %d\n", results[i]);
        fflush(stdout);
        _exit(3);
    }
    int status;
    waitpid(child, &status, 0);
    printf("child ended %d\n", WEXITSTATUS(status));
    child = vfork();
    if (child == 0) _exit(4);
    waitpid(child, &status, 0);
    printf("child ended %d, free %d, none left %d\n", WEXITSTATUS(status), release(p), waitpid(-1, &status, 0));
}

/* A library loaded with RTLD_DEEPBIND has its own idea of dlsym. */
static void deepbind(const char *path)
{
    load();
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    if (!library) printf("%s\n", dlerror());
    int (*run)(void) = dlsym(library, "run");
    address p = 0;
    printf("alloc %d\n", alloc(&p, 4096));
    printf("run %d\n", run());
}

/* LLVM's OpenMP looks for tools so; libraries that stand in for each other look for the next so. */
static void chains(void)
{
    int (*foo)(void) = dlsym(RTLD_DEFAULT, "foo");
    printf("foo %d\n", foo ? foo() : -1);
    printf("tool %s\n", dlsym(RTLD_DEFAULT, "ompt_start_tool") ? "there" : "none");
    printf("driver %s\n", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") ? "there" : "none");
    printf("next %s\n", dlsym(RTLD_NEXT, "malloc") == dlsym(RTLD_DEFAULT, "malloc") ? "same" : "other");
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "signals")) signals();
    if (!strcmp(what, "threads")) threads();
    if (!strcmp(what, "errors")) errors();
    if (!strcmp(what, "forked")) forked();
    if (!strcmp(what, "deepbind")) deepbind(argv[2]);
    if (!strcmp(what, "chains")) chains();
    return 0;
}

/* Harm: lines of threads that had ended were free again only once a second, so threads that came one after another found
 * none; and where memory for a thread could not be had, each event took a line for ever. Two threads are
 * alive at a time; with `locked` all memory is locked (mlockall), with `room` address space is short for a while.
 * And each thread touched fifty pages anew that the one before it had given up: with `faults` they are counted. */
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);
int cuMemFree_v2(address);

static void *work(void *n)
{
    address p;
    for (long i = 0; i < (long)n; i++) {
        cuMemAlloc_v2(&p, 1 << 20);
        cuMemFree_v2(p);
    }
    return 0;
}

static sem_t go, done;
static void *in_steps(void *unused)
{
    for (;;) {
        sem_wait(&go);
        work((void *)1200);
        sem_post(&done);
    }
    return unused;
}

int main(int argc, char **argv)
{
    int n = atoi(argv[1]);
    const char *how = argc > 2 ? argv[2] : "";
    if (!strcmp(how, "locked"))
        printf("mlockall %d\n", mlockall(MCL_CURRENT | MCL_FUTURE));
    cuInit(0);
    work((void *)1);
    pthread_t thread;
    if (!strcmp(how, "room")) {
        sem_init(&go, 0, 0);
        sem_init(&done, 0, 0);
        pthread_create(&thread, 0, in_steps, 0);
        long pages = 0;
        FILE *file = fopen("/proc/self/statm", "r");
        if (!file || fscanf(file, "%ld", &pages) != 1)
            return 1;
        fclose(file);
        struct rlimit limit = { pages * 4096 + (200 << 10), RLIM_INFINITY };
        setrlimit(RLIMIT_AS, &limit);
        sem_post(&go);
        sem_wait(&done);
        limit.rlim_cur = RLIM_INFINITY;
        setrlimit(RLIMIT_AS, &limit);
        sem_post(&go);
        sem_wait(&done);
    }
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    for (int i = 0; i < n; i++) {
        pthread_create(&thread, 0, work, (void *)1);
        pthread_join(thread, 0);
    }
    getrusage(RUSAGE_SELF, &after);
    long faults = after.ru_minflt - before.ru_minflt;
    if (!strcmp(how, "faults") && faults > 20 * n)
        printf("%ld page faults for %d threads\n", faults, n);
    puts("done");
    return 0;
}

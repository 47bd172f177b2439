/* Harm: a process that shares the program's memory and is no thread of it (CLONE_VM without CLONE_THREAD) looked gone while it
 * lived, because no thread of the program has its number. Its line of the ring was taken, and the next event crashed. It
 * makes calls, on a parked thread's thread-local words, while threads come and go. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

static atomic_int is_parked, is_over;
static atomic_long n_child;
static void *words;

static void *park(void *unused)
{
#if defined __x86_64__
    __asm__("mov %%fs:0, %0" : "=r"(words));
#else
    __asm__("mrs %0, tpidr_el0" : "=r"(words));
#endif
    is_parked = 1;
    while (!is_over)
        usleep(2000);
    return unused;
}

static void *work(void *unused)
{
    address p;
    for (int i = 0; i < 3; i++)
        cuMemAlloc_v2(&p, 1 << 20);
    return unused;
}

static int child(void *unused)
{
    address p;
    (void)unused;
    while (!is_over)
        n_child += cuMemAlloc_v2(&p, 1 << 12) == 0 && usleep(20) == 0;
    return 0;
}

int main(void)
{
    pthread_t parked;
    address p;
    int status = 0;
    cuInit(0);
    cuMemAlloc_v2(&p, 1 << 20);
    pthread_create(&parked, 0, park, 0);
    while (!is_parked)
        usleep(100);
    char *stack = malloc(1 << 20);
    int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SETTLS | SIGCHLD;
    int pid = clone(child, stack + (1 << 20) - 64, flags, 0, 0, words, 0);
    for (int i = 0; i < 1000; i++) {
        pthread_t thread;
        pthread_create(&thread, 0, work, 0);
        pthread_join(thread, 0);
    }
    while (n_child < 100)
        usleep(100);
    is_over = 1;
    waitpid(pid, &status, 0);
    pthread_join(parked, 0);
    printf("child %d\n", status);
    return 0;
}

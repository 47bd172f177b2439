/* counted ROUNDS [PAUSE [fork|forks]]: blocks come and go in an order that follows from nothing but their number, so that a reader knows what must
 * be held after any of them. The n-th allocation has 512 + n bytes. Every 512 rounds it sleeps PAUSE microseconds. With `fork`, a child does
 * the same in the middle of it. With `forks`, a child does the same beside it, and both start processes all the time that end at once. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long P;
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(P *, size_t);
int cuMemFree_v2(P);

enum { SLOTS = 64, KEPT = 10 };

static unsigned long long seed = 1, n_allocated;
static int is_forking;

static unsigned random_number(void)
{
    seed = seed * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(seed >> 33);
}

static P allocated(void)
{
    P block;
    return cuMemAlloc_v2(&block, 512 + n_allocated++) ? (exit(1), 0) : block;
}

static void begin(void)
{
    void *context;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) exit(1);
    for (int i = 0; i < KEPT; i++) allocated();
}

static void work(long from, long to, long pause)
{
    static P live[SLOTS];
    for (long i = from; i < to; i++) {
        unsigned at = random_number() % SLOTS;
        if (live[at]) {
            if (cuMemFree_v2(live[at])) exit(1);
            live[at] = 0;
        } else {
            live[at] = allocated();
        }
        if (pause && i % 512 == 0) usleep(pause);
        if (is_forking && i % 4096 == 0) {
            pid_t child = fork();
            if (child == 0) _exit(0);
            waitpid(child, 0, 0);
        }
    }
}

int main(int n, char **words)
{
    long rounds = n > 1 ? atol(words[1]) : 1000, pause = n > 2 ? atol(words[2]) : 0;
    int forks = n > 3 && !strcmp(words[3], "fork");
    is_forking = n > 3 && !strcmp(words[3], "forks");
    if (is_forking) fork();
    if (!forks) {
        begin();
        work(0, rounds, pause);
        return 0;
    }
    /* CUDA does not survive a fork: the parent begins before it, and the child by itself after it. */
    pid_t child = fork();
    begin();
    work(0, rounds / 2, pause);
    if (child == 0) {
        work(rounds / 2, rounds, pause);
        return 0;
    }
    pid_t second = fork();
    if (second == 0) _exit(0);
    work(rounds / 2, rounds, pause);
    int first_status, second_status;
    waitpid(child, &first_status, 0);
    waitpid(second, &second_status, 0);
    return first_status || second_status;
}

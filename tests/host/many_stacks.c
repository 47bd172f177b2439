/* Coroutines that allocate in turn, as many as the first argument says, so often that there are as many allocations as the
 * second says. Says the nanoseconds of a pair of allocation and free. With a third argument, the frames cross pages. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

typedef unsigned long long address;
int cuMemAlloc_v2(address *at, size_t bytes);
int cuMemFree_v2(address at);

static ucontext_t outside, *inside;
static int is_large;

static void work(int me)
{
    volatile char *room = __builtin_alloca(is_large ? 12000 : 16);
    room[0] = 1;
    for (;;) {
        address at;
        cuMemAlloc_v2(&at, 4096);
        cuMemFree_v2(at);
        swapcontext(&inside[me], &outside);
    }
}

int main(int n, char **arguments)
{
    if (n < 3)
        return 2;
    int stacks = atoi(arguments[1]), rounds = atoi(arguments[2]) / stacks;
    is_large = n > 3;
    inside = calloc(stacks, sizeof *inside);
    for (int i = 0; i < stacks; i++) {
        char *stack = mmap(0, 17 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        mprotect(stack, 4096, PROT_NONE);
        getcontext(&inside[i]);
        inside[i].uc_stack.ss_sp = stack + 4096;
        inside[i].uc_stack.ss_size = 16 * 4096;
        inside[i].uc_link = &outside;
        makecontext(&inside[i], (void (*)(void))work, 1, i);
    }
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int round = 0; round < rounds; round++)
        for (int i = 0; i < stacks; i++)
            swapcontext(&outside, &inside[i]);
    clock_gettime(CLOCK_MONOTONIC, &end);
    double ns = (end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec);
    fprintf(stderr, "%d stacks: %.0f ns\n", stacks, ns / ((double)stacks * rounds));
    printf("%d pairs\n", stacks * rounds);
    return 0;
}

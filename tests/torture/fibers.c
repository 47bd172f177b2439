/* Fibers: many stacks on one thread. `fibers COUNT TURNS`: COUNT stacks, each of which allocates once a turn; half of them have no guard
 * page below, and every turn some of them end and are unmapped while their neighbours live. */
#include "torture.h"
#include <ucontext.h>

#define STACK (64 << 10)
static ucontext_t home;
struct fiber {
    ucontext_t context;
    char *stack;
    int is_over;
};
static struct fiber *fibers;
static long failed;

__attribute__((noinline)) static void deeper(int depth)
{
    volatile char room[200];
    room[0] = (char)depth;
    if (depth == 0) failed += work(1);
    else deeper(depth - 1);
    room[1] = room[0];
}
static void fiber(int number)
{
    struct fiber *self = &fibers[number];
    for (int turn = 0; !self->is_over; turn++) {
        deeper((number + turn) % 8);
        swapcontext(&self->context, &home);
    }
}
static void make(int number)
{
    struct fiber *self = &fibers[number];
    int has_guard = number % 2;
    self->stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (self->stack == MAP_FAILED) die("mmap");
    if (has_guard) mprotect(self->stack, 4096, PROT_NONE);
    getcontext(&self->context);
    self->context.uc_stack.ss_sp = self->stack;
    self->context.uc_stack.ss_size = STACK;
    self->context.uc_link = &home;
    self->is_over = 0;
    makecontext(&self->context, (void (*)(void))fiber, 1, number);
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 4, turns = argc > 2 ? atoi(argv[2]) : 10;
    fibers = calloc((size_t)count, sizeof *fibers);
    begin();
    for (int i = 0; i < count; i++) make(i);
    for (int turn = 0; turn < turns; turn++) {
        for (int i = 0; i < count; i++) swapcontext(&home, &fibers[i].context);
        for (int i = turn % 7; i < count; i += 7) {
            fibers[i].is_over = 1;
            swapcontext(&home, &fibers[i].context);
            munmap(fibers[i].stack, STACK);
            make(i);
        }
    }
    printf("%d fibers, %d turns, %ld failed\n", count, turns, failed);
    return 0;
}

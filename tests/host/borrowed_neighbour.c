/* A coroutine on a stack without a guard, in one mapping with memory that is given back later. It calls the driver through
 * code without unwind tables, as compilers at run time make it, that uses the frame pointer for something else: it points
 * into what was given back. */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

typedef unsigned long long address;
int cuMemAlloc_v2(address *at, size_t bytes);

enum { STACK = 256 << 10 };
static ucontext_t outside, inside;
static char *stack;

static int first(void)
{
    address at;
    return cuMemAlloc_v2(&at, 1 << 20);
}

__attribute__((noinline)) static int second(void)
{
    volatile char room[64];
    address at;
    room[0] = 1;
    return cuMemAlloc_v2(&at, 1 << 21) + room[0];
}

static void run(void)
{
    /* push rbp; mov rbp, rdi; sub rsp, 16; call rsi; add rsp, 16; pop rbp; ret */
    static const unsigned char code[] = {0x55, 0x48, 0x89, 0xfd, 0x48, 0x83, 0xec, 0x10, 0xff, 0xd6, 0x48, 0x83, 0xc4, 0x10, 0x5d, 0xc3};
    void *page = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(page, code, sizeof code);
    void (*call)(void *, int (*)(void)) = (void (*)(void *, int (*)(void)))page;
    call(stack + STACK + 4096, first);
    puts("with the neighbour");
    fflush(stdout);
    swapcontext(&inside, &outside);
    volatile char *deeper = __builtin_alloca(256);
    deeper[0] = 1;
    call(stack + STACK + 4096, second);
    puts("without it");
}

int main(void)
{
    stack = mmap(0, 2 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    getcontext(&inside);
    inside.uc_stack.ss_sp = stack;
    inside.uc_stack.ss_size = STACK;
    inside.uc_link = &outside;
    makecontext(&inside, run, 0);
    swapcontext(&outside, &inside);
    munmap(stack + STACK, STACK);
    swapcontext(&outside, &inside);
    puts("end");
    return 0;
}

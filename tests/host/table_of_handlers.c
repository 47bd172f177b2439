/* Harm: starting the recorder called signal() and dup2() in a child that shared the program's memory: libraries that stand
 * in for them, and keep a table, had the program's table changed. With LIBRARY this is such a library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#ifdef LIBRARY
static sighandler_t table[65];
static int n_calls;
sighandler_t table_of(int number) { return table[number]; }
int calls(void) { return n_calls; }
sighandler_t signal(int number, sighandler_t handler)
{
    sighandler_t (*real)(int, sighandler_t) = dlsym(RTLD_NEXT, "signal");
    if (number > 0 && number < 65)
        table[number] = handler;
    n_calls++;
    return real(number, handler);
}
int close(int file)
{
    int (*real)(int) = dlsym(RTLD_NEXT, "close");
    n_calls++;
    return real(file);
}
int dup2(int from, int to)
{
    int (*real)(int, int) = dlsym(RTLD_NEXT, "dup2");
    n_calls++;
    return real(from, to);
}
#else
typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);
sighandler_t table_of(int) __attribute__((weak));
int calls(void) __attribute__((weak));
static void handle(int number) { (void)number; }

int main(void)
{
    address p;
    signal(SIGUSR1, handle);
    int before = calls();
    cuInit(0);
    cuMemAlloc_v2(&p, 1 << 20);
    printf("the table has the handler: %d; calls meanwhile: %d\n", table_of(SIGUSR1) == handle, calls() - before);
    return 0;
}
#endif

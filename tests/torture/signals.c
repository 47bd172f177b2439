/* Signals at 10 kHz to threads that allocate; handlers that allocate too, on the thread's own stack or on one of the smallest that there
 * may be: `signals own|alternate COUNT`. */
#include "torture.h"
#include <sys/auxv.h>

#ifndef AT_MINSIGSTKSZ
#define AT_MINSIGSTKSZ 51
#endif
static volatile sig_atomic_t handled;
static struct line *handlers[8];
static __thread int number;
static volatile int is_over;

static void on_signal(int signal)
{
    (void)signal;
    /* The thread has just begun, and no line yet. */
    if (!number) return;
    int saved = errno;
    struct line *line = handlers[number];
    errno = 4711;
    address p = take_on(line);
    int failed = give_on(line, p);
    if (!p || failed || errno != 4711) handled = -1000000000;
    errno = saved;
    handled++;
}

static const char *where;
static void alternate(void)
{
    /* What the kernel needs for its frame, and 4 kB for the handler. Kernels before 5.14, and emulators, do not say. */
    size_t least = getauxval(AT_MINSIGSTKSZ) ? getauxval(AT_MINSIGSTKSZ) : (size_t)MINSIGSTKSZ;
    size_t bytes = least + 4096;
    /* With a page below that may not be touched: who needs more is seen. */
    size_t room = (bytes + 4095) & ~4095UL;
    char *stack = mmap(NULL, room + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(stack, 4096, PROT_NONE);
    stack_t set = {.ss_sp = stack + 4096, .ss_size = room};
    if (sigaltstack(&set, NULL)) die("sigaltstack");
}
static void *thread(void *argument)
{
    number = (int)(long)argument;
    if (!strcmp(where, "alternate")) alternate();
    long failed = 0;
    while (!is_over) {
        errno = 4712;
        failed += work(20);
        failed += errno != 4712;
    }
    return (void *)failed;
}

int main(int argc, char **argv)
{
    where = argc > 1 ? argv[1] : "own";
    int count = argc > 2 ? atoi(argv[2]) : 1000;
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART | SA_ONSTACK};
    begin();
    work(1);
    sigaction(SIGUSR1, &action, NULL);
    for (int i = 0; i < 8; i++) handlers[i] = new_line(), handlers[i]->process |= ASIDE;
    void *threads[2];
    for (long i = 0; i < 2; i++) threads[i] = start(thread, (void *)(i + 1));
    while (handled >= 0 && handled < count) {
        for (int i = 0; i < 2; i++) pthread_kill(*(pthread_t *)threads[i], SIGUSR1);
        rest(100);
    }
    is_over = 1;
    long failed = 0;
    for (int i = 0; i < 2; i++) failed += (long)join(threads[i]);
    printf("signals %s, %ld failed\n", handled >= count ? "handled" : "went wrong", failed);
    return 0;
}

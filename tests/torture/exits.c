/* The end of a process, by every way there is, while other threads allocate: `exits WAY` */
#include "torture.h"

static void *leaves(void *unused)
{
    (void)unused;
    work(10);
    exit(21);
}
static void at_the_end(void)
{
    work(20);
}
static void leaves_again(void)
{
    work(5);
    _exit(22);
}
static void *survives(void *unused)
{
    (void)unused;
    rest(50000);
    work(100);
    printf("survived\n");
    fflush(stdout);
    exit(23);
}
__attribute__((destructor)) static void last(void)
{
    if (page) work(7);
}

int main(int argc, char **argv)
{
    const char *way = argc > 1 ? argv[1] : "return";
    char *again[] = {argv[0], "return", NULL};
    begin();
    work(100);
    for (int i = 0; i < 3; i++) start(work_on, (void *)50L);
    rest(20000);
    printf("leaves by %s\n", way);
    fflush(stdout);
    if (!strcmp(way, "return")) return 20;
    if (!strcmp(way, "exit")) exit(21);
    if (!strcmp(way, "_exit")) _exit(22);
    if (!strcmp(way, "quick_exit")) at_quick_exit(at_the_end), quick_exit(24);
    if (!strcmp(way, "abort")) abort();
    if (!strcmp(way, "segv")) *(volatile int *)8 = 1;
    if (!strcmp(way, "term")) raise(SIGTERM);
    if (!strcmp(way, "kill")) raise(SIGKILL);
    if (!strcmp(way, "thread")) join(start(leaves, NULL));
    if (!strcmp(way, "main-ends")) start(survives, NULL), pthread_exit(NULL);
    if (!strcmp(way, "atexit")) atexit(at_the_end), exit(25);
    if (!strcmp(way, "atexit-exits")) atexit(leaves_again), exit(26);
    if (!strcmp(way, "exec")) execv("/proc/self/exe", again);
    return 99;
}

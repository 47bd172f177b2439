/* Real-time programs lock their memory, present and future; threads come and go after it. `locked THREADS`: prints nothing of how much is
 * locked, but has no more than it may have. */
#include "torture.h"

static void *thread(void *unused)
{
    (void)unused;
    return (void *)work(3);
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 10;
    long failed = 0;
    begin();
    printf("locked %d\n", mlockall(MCL_CURRENT | MCL_FUTURE));
    failed += work(10);
    for (int i = 0; i < count; i++) failed += (long)join(thread_of(thread, NULL, 1 << 16));
    /* The program's own next memory must still be there for it. */
    void *own_memory = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    printf("%d threads, %ld failed, %s\n", count, failed, own_memory == MAP_FAILED ? "no memory" : "memory");
    return 0;
}

/* Harm: under a limit of file sizes (`ulimit -f`) the ring's file ended the program by SIGXFSZ. The limit comes as the
 * number of bytes; the program's own handler says whether the signal ever reached it. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);
int cuMemFree_v2(address);

static volatile int reached;
static void reach(int signal) { (void)signal; reached++; }

int main(int argc, char **argv)
{
    struct rlimit limit = { strtoull(argv[1], 0, 10), RLIM_INFINITY };
    if (argc > 2)
        signal(SIGXFSZ, reach);
    setrlimit(RLIMIT_FSIZE, &limit);
    address p;
    cuInit(0);
    for (int i = 0; i < 10; i++) {
        cuMemAlloc_v2(&p, 1 << 20);
        cuMemFree_v2(p);
    }
    printf("done, SIGXFSZ %d\n", reached);
    return 0;
}

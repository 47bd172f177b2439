/* Harm: the environment was walked while another thread changed it. One thread sets variables without end; processes are
 * forked, each of which begins a session. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

static volatile int go;
static void *change(void *unused)
{
    char name[32];
    for (int i = 0; i < 100000; i++) {
        snprintf(name, sizeof name, "V%d", i % 3000);
        setenv(name, "a value that is not short, so that it is somewhere else each time", 1);
        if (i % 3 == 0)
            unsetenv(name);
        go = 1;
    }
    return unused;
}

int main(void)
{
    int failed = 0;
    for (int i = 0; i < 10; i++) {
        int child = fork(), status;
        if (!child) {
            pthread_t thread;
            address p;
            pthread_create(&thread, 0, change, 0);
            while (!go)
                ;
            usleep(100 * i);
            cuInit(0);
            cuMemAlloc_v2(&p, 1 << 20);
            _exit(0);
        }
        waitpid(child, &status, 0);
        failed += status != 0;
    }
    printf("%d failed\n", failed);
    return 0;
}

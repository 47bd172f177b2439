/* Asks the fake driver for memory and gives it back, N times with a pause of M milliseconds in between, and says so.
 *
 *   program N M [hidden] [threads] [keep] [hold FILE] [rights]
 *
 * hidden: nobody but root may look at it in /proc from then on (prctl(2), PR_SET_DUMPABLE).
 * threads: each time from a thread of its own that ends.
 * keep: gives nothing back, so that what it holds grows.
 * hold FILE: when all is done, waits until that file is there.
 * rights: says whether it has rights that its user does not have (getauxval(3), AT_SECURE). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <unistd.h>

int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemFree_v2(unsigned long long);

static void *context;
static int keep, failures;

static void *step(void *size)
{
    unsigned long long address;
    cuCtxSetCurrent(context);
    failures += cuMemAlloc_v2(&address, (size_t)size) != 0;
    if (!keep) failures += cuMemFree_v2(address) != 0;
    return NULL;
}

int main(int count, char **words)
{
    int n = count > 1 ? atoi(words[1]) : 1, pause = count > 2 ? atoi(words[2]) : 0, threads = 0;
    const char *hold = NULL;
    for (int i = 3; i < count; i++) {
        if (strcmp(words[i], "hidden") == 0) prctl(PR_SET_DUMPABLE, 0);
        if (strcmp(words[i], "threads") == 0) threads = 1;
        if (strcmp(words[i], "keep") == 0) keep = 1;
        if (strcmp(words[i], "rights") == 0) printf("rights of its own: %lu\n", getauxval(AT_SECURE));
        if (strcmp(words[i], "hold") == 0) hold = words[++i];
    }
    cuInit(0);
    cuDevicePrimaryCtxRetain(&context, 0);
    for (int i = 0; i < n; i++) {
        /* Each a different size, so that no two programs change alike. */
        void *size = (void *)(((size_t)8 << 20) * (size_t)(1 + i % 7));
        pthread_t thread;
        if (threads && pthread_create(&thread, NULL, step, size) == 0)
            pthread_join(thread, NULL);
        else
            step(size);
        usleep((useconds_t)pause * 1000);
    }
    while (hold && access(hold, F_OK) != 0) usleep(10000);
    printf("done %d, %d failed\n", n, failures);
    return failures != 0;
}

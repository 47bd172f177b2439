/* Threads that are cancelled while they allocate: `cancel deferred|async|first COUNT`. `first`: a thread whose cancellation is pending makes
 * the first call of the process; a library that lets itself be cancelled there leaves the process half started. */
#include "torture.h"

static int is_async;
static atomic_int working;
static void *victim(void *unused)
{
    (void)unused;
    /* A line exists before somebody may end us in the middle of making one. */
    here();
    if (is_async) pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    atomic_fetch_add(&working, 1);
    for (;;) {
        work(5);
        if (!is_async) pthread_testcancel();
    }
    return NULL;
}
static void *pending(void *unused)
{
    (void)unused;
    here();
    pthread_cancel(pthread_self());
    /* None of these is a place where a thread can be cancelled. */
    work(10);
    for (;;) pthread_testcancel();
    return NULL;
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "deferred";
    int count = argc > 2 ? atoi(argv[2]) : 10, cancelled = 0;
    is_async = !strcmp(how, "async");
    begin();
    if (!strcmp(how, "first")) {
        cancelled += join(start(pending, NULL)) == PTHREAD_CANCELED;
        printf("cancelled %d, then %ld failed\n", cancelled, work(20));
        return 0;
    }
    for (int i = 0; i < count; i++) {
        void *threads[4];
        atomic_store(&working, 0);
        for (int k = 0; k < 4; k++) threads[k] = start(victim, NULL);
        while (atomic_load(&working) < 4) rest(100);
        work(i % 50);
        for (int k = 0; k < 4; k++) pthread_cancel(*(pthread_t *)threads[k]);
        for (int k = 0; k < 4; k++) cancelled += join(threads[k]) == PTHREAD_CANCELED;
    }
    printf("cancelled %d, then %ld failed\n", cancelled, work(20));
    return 0;
}

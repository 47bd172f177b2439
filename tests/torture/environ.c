/* Threads that change the environment while sessions begin: `environ COUNT` processes, one after the other, each of which begins its session
 * while three threads set, replace and remove variables. */
#include "torture.h"

static void *writer(void *argument)
{
    char name[64], value[256];
    for (unsigned i = 0; !stop; i++) {
        snprintf(name, sizeof name, "VARIABLE_%ld_%u", (long)argument, i % 97);
        memset(value, 'a' + (int)(i % 26), sizeof value - 1);
        value[i % 255] = 0;
        if (i % 3) setenv(name, value, 1);
        else unsetenv(name);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    int count = argc > 1 ? atoi(argv[1]) : 10, wrong = 0;
    open_page();
    for (int i = 0; i < count; i++) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            in_child();
            void *threads[3];
            for (long k = 0; k < 3; k++) threads[k] = start(writer, (void *)k);
            rest(i % 7 * 300);
            if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) _exit(1);
            long failed = work(20);
            stop = 1;
            for (int k = 0; k < 3; k++) join(threads[k]);
            exit(failed ? 1 : 7);
        }
        int status;
        waitpid(child, &status, 0);
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 7) {
            wrong++;
            printf("process %d ended with %x\n", i, status);
        }
    }
    printf("%d processes, %d went wrong\n", count, wrong);
    return 0;
}

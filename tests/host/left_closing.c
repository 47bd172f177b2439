/* Harm: a `dlclose` that did not come back to where it was called, or whose process was left by a fork, kept the library from
 * reading unwind tables for ever, so that stacks were cut. Here a library's destructor calls back, and that
 *
 *   jump   leaves the dlclose by longjmp
 *   ends   ends its thread there
 *   fork   waits while another thread forks; the child goes on
 *   forks  forks itself; both go on
 *
 * Then 3 MiB are allocated below a function without unwind tables, where the library must be able to read those of the others.
 * With -DLIBRARY it is the library. */
#ifdef LIBRARY

void (*calls_back)(void);
__attribute__((destructor)) static void end(void)
{
    if (calls_back) calls_back();
}

#else

#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long address;
int cuInit(unsigned);
int cuMemAlloc_v2(address *, size_t);

/* Keeps a frame pointer, as a compiler at run time would, and says nothing of it. */
void without_tables(void (*)(void));
asm(".text\n"
    "without_tables: push %rbp; mov %rsp, %rbp; call *%rdi; pop %rbp; ret\n");

static void *library;
static jmp_buf back;
static sem_t is_inside, may_go;
static volatile pid_t child = -1;

static void jump(void) { longjmp(back, 1); }
static void end_thread(void) { pthread_exit(NULL); }
static void fork_here(void) { child = fork(); }
static void wait_inside(void)
{
    sem_post(&is_inside);
    while (sem_wait(&may_go) != 0)
        ;
}
static void *unload(void *unused)
{
    dlclose(library);
    return unused;
}
static void inner(void)
{
    address p;
    cuMemAlloc_v2(&p, 3 << 20);
}
__attribute__((noinline)) void outer(void)
{
    without_tables(inner);
    asm volatile("");
}
static void load(const char *path, void (*back)(void))
{
    library = dlopen(path, RTLD_NOW);
    if (!library) exit(3);
    *(void (**)(void))dlsym(library, "calls_back") = back;
}

int main(int count, char **words)
{
    address p;
    pthread_t thread;
    if (count < 3) return 2;
    const char *how = words[2];
    cuInit(0);
    cuMemAlloc_v2(&p, 1 << 20);
    if (strcmp(how, "jump") == 0) {
        load(words[1], jump);
        if (setjmp(back) == 0) dlclose(library);
    } else if (strcmp(how, "ends") == 0) {
        load(words[1], end_thread);
        pthread_create(&thread, NULL, unload, NULL);
        pthread_join(thread, NULL);
    } else if (strcmp(how, "fork") == 0) {
        load(words[1], wait_inside);
        pthread_create(&thread, NULL, unload, NULL);
        while (sem_wait(&is_inside) != 0)
            ;
        child = fork();
        if (child != 0) {
            sem_post(&may_go);
            pthread_join(thread, NULL);
        }
    } else {
        load(words[1], fork_here);
        dlclose(library);
    }
    outer();
    int status = 0;
    if (child > 0) waitpid(child, &status, 0);
    printf("%s: %d\n", how, status);
    fflush(stdout);
    /* The loader's lock is held by who never gives it back. */
    _exit(0);
}

#endif

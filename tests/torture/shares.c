/* Processes that share the program's memory and are no threads of it, in all combinations of what clone(2) shares, while threads come and
 * go: `shares TURNS`. Each has thread-local storage that is its own for as long as it lives: that of a thread that waits. */
#include "torture.h"
#include <sched.h>

static int go_on;
static void *volatile words_of[4];

static void *lend(void *number)
{
    void *words;
#if defined __x86_64__
    __asm__("mov %%fs:0, %0" : "=r"(words));
#else
    __asm__("mrs %0, tpidr_el0" : "=r"(words));
#endif
    __atomic_store_n(&words_of[(long)number], words, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&go_on, __ATOMIC_ACQUIRE)) rest(1000);
    return NULL;
}

static int child(void *line)
{
    for (int i = 0; i < 50; i++) {
        address p = take_on((struct line *)line);
        if (p) give_on((struct line *)line, p);
    }
    return 7;
}

static void *turn(void *n) { return (void *)work((long)n); }

int main(int argc, char **argv)
{
    static const int kinds[4] = {0, CLONE_FILES, CLONE_FS, CLONE_FILES | CLONE_FS};
    static char stacks[4][1 << 16] __attribute__((aligned(64)));
    long turns = argc > 1 ? atol(argv[1]) : 3, wrong = 0;
    begin();
    work(1);
    void *lenders[4];
    struct line *lines[4];
    for (long i = 0; i < 4; i++) {
        lenders[i] = start(lend, (void *)i);
        lines[i] = new_line();
        while (!__atomic_load_n(&words_of[i], __ATOMIC_ACQUIRE)) rest(100);
    }
    for (long n = 0; n < turns; n++) {
        pid_t children[4];
        for (int i = 0; i < 4; i++) {
            int flags = CLONE_VM | CLONE_SETTLS | SIGCHLD | kinds[i];
            children[i] = clone(child, stacks[i] + sizeof stacks[i], flags, lines[i], NULL, words_of[i], NULL);
            if (children[i] < 0) die("clone");
        }
        for (int i = 0; i < 4; i++) wrong += join(start(turn, (void *)5L)) != NULL;
        for (int i = 0; i < 4; i++) {
            int status = 0;
            wrong += waitpid(children[i], &status, 0) != children[i] || !WIFEXITED(status) || WEXITSTATUS(status) != 7;
        }
    }
    __atomic_store_n(&go_on, 1, __ATOMIC_RELEASE);
    for (int i = 0; i < 4; i++) join(lenders[i]);
    printf("%ld turns, %ld wrong\n", turns, wrong);
    return wrong != 0;
}

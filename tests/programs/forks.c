//! fork: a child of a process that never used CUDA can use it; a child of one that did cannot.
//# Link: cudart
//# Expect: cudaMalloc 1000 freed
//# Expect: cudaMalloc 2000 freed
//# Processes: 2
#include "api.h"

#include <sys/wait.h>
#include <unistd.h>

static void in_child(void (*body)(void))
{
    int status;
    pid_t child = fork();
    if (child == 0) {
        body();
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void fresh(void)
{
    void *p;
    OK(cudaMalloc(&p, 1000));
    OK(cudaFree(p));
}

static void broken(void)
{
    void *p;
    CHECK(cudaMalloc(&p, 3000) != 0);
}

int main(void)
{
    void *p;
    in_child(fresh);
    OK(cudaMalloc(&p, 2000));
    in_child(broken);
    OK(cudaFree(p));
    return 0;
}

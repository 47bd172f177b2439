//! _exit: no destructor runs.
//# Link: cudart
//# Exit: 7
//# Expect: cudaMalloc 1000 freed
//# Expect: cudaMalloc 4096 leaked
#include "api.h"

#include <unistd.h>

int main(void)
{
    void *p;
    OK(cudaMalloc(&p, 1000));
    OK(cudaFree(p));
    OK(cudaMalloc(&p, 4096));
    _exit(7);
}

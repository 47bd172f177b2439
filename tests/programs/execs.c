//! exec in the middle: what was allocated goes without a free, and the same pid starts again.
//# Link: cudart
//# Expect: cudaMalloc 1000 leaked
//# Expect: cudaMalloc 2000 freed
#include "api.h"

#include <unistd.h>

int main(int argc, char **argv)
{
    void *p;
    OK(cudaMalloc(&p, argc > 1 ? 2000 : 1000));
    if (argc > 1) {
        OK(cudaFree(p));
        return 0;
    }
    char *again[] = {argv[0], "again", NULL};
    execv("/proc/self/exe", again);
    return 1;
}

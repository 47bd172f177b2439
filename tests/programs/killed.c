//! kill -9 in the middle of a loop.
//# Link: cudart
//# Signal: 9
//# Expect: cudaMalloc 65536 freed x500
//# Expect: cudaMalloc 65536 leaked
#include "api.h"

#include <signal.h>
#include <unistd.h>

int main(void)
{
    for (int i = 0;; i++) {
        void *p;
        OK(cudaMalloc(&p, 65536));
        if (i == 500) kill(getpid(), SIGKILL);
        OK(cudaFree(p));
    }
}

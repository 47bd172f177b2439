//! kill -9 right after the first call: before its recorder has begun, mostly.
//# Link: cudart
//# Signal: 9
//# Expect: cudaMalloc 4096 leaked
#include "api.h"

#include <signal.h>
#include <unistd.h>

int main(void)
{
    void *p;
    OK(cudaMalloc(&p, 4096));
    kill(getpid(), SIGKILL);
}

//! A thousand blocks of 64 KiB, every tenth forgotten.
//# Link: cudart
//# Expect: cudaMalloc 65536 freed x900
//# Expect: cudaMalloc 65536 leaked x100
#include "api.h"

int main(void)
{
    for (int i = 0; i < 1000; i++) {
        void *p;
        OK(cudaMalloc(&p, 65536));
        if (i % 10) OK(cudaFree(p));
    }
    OK(cudaDeviceSynchronize());
    return 0;
}

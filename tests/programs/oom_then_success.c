//! Out of memory, a free, and the same request again; then a scripted failure.
//# Link: cudart
//# Env: FAKE_CUDA_MEMORY=1GiB
//# Env: FAKE_CUDA_FAIL=cuMemAlloc_v2:5:2
//# Expect: cudaMalloc 629145600 freed x2
//# Expect: cudaMalloc 629145600 failed:2
//# Expect: cudaMalloc 1024 failed:2
//# Expect: cudaMalloc 1024 freed x2
#include "api.h"

int main(void)
{
    void *big, *again, *small;
    OK(cudaMalloc(&big, 600 * MIB));
    RETURNS(2, cudaMalloc(&again, 600 * MIB));
    CHECK(cudaGetLastError() == 2 && cudaGetLastError() == 0);
    OK(cudaFree(big));
    OK(cudaMalloc(&again, 600 * MIB));
    OK(cudaFree(again));
    OK(cudaMalloc(&small, 1024));
    OK(cudaFree(small));
    RETURNS(2, cudaMalloc(&small, 1024)); /* the fifth call, as scripted */
    OK(cudaMalloc(&small, 1024));
    OK(cudaFree(small));
    return 0;
}

// grew: a scratch buffer for each call, freed on the way without an error only.
#include <cuda_runtime.h>
#include <cstdio>
static int solve(int step) {
    void *scratch = nullptr, *result = nullptr;
    if (cudaMalloc(&result, 1 << 20) != cudaSuccess) return 1;
    if (cudaMalloc(&scratch, 4 << 20) != cudaSuccess) return 1;  // <- fault
    cudaMemset(scratch, step, 4 << 20);
    cudaFree(result);
    if (step >= 0) return 0;
    cudaFree(scratch);
    return 0;
}
int main() {
    for (int step = 0; step < 60; step++)
        if (solve(step)) return 1;
    cudaDeviceSynchronize();
    std::puts("solved");
}

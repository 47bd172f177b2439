// nothing_wrong: buffers of a solver, made once for each size and given back at the end.
#include <cuda_runtime.h>
#include <cstdio>
int main() {
    void *arena[8];
    for (int size = 0; size < 8; size++)
        if (cudaMalloc(&arena[size], (size_t)(size + 1) << 20) != cudaSuccess) return 1;
    for (int step = 0; step < 100; step++) {
        void *scratch = nullptr;
        if (cudaMalloc(&scratch, 2 << 20) != cudaSuccess) return 1;
        cudaMemset(scratch, step, 2 << 20);
        cudaFree(scratch);
    }
    for (void *buffer : arena) cudaFree(buffer);
    std::puts("solved");
}

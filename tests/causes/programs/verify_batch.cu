// Batch signature checks: each batch is uploaded, hashed on the device and compared.
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#define CUDA_TRY(call)                                                        \
    do {                                                                      \
        cudaError_t status_ = (call);                                         \
        if (status_ != cudaSuccess) return Result::kDeviceError;              \
    } while (0)

enum class Result { kOk, kBadBatch, kDeviceError };

static bool g_fixed = false;

__global__ void fold(const uint32_t* msgs, const uint32_t* keys, uint32_t* out, int words, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= count) return;
    uint32_t h = keys[i];
    for (int w = 0; w < words; ++w) h = (h ^ msgs[(size_t)i * words + w]) * 16777619u;
    out[i] = h;
}

struct Buffers {
    uint32_t *msgs = nullptr, *keys = nullptr, *out = nullptr;
    void release() {
        cudaFree(msgs);
        cudaFree(keys);
        cudaFree(out);
        msgs = keys = out = nullptr;
    }
    ~Buffers() {
        if (g_fixed) release();
    }
};

Result verify(const std::vector<uint32_t>& msgs, const std::vector<uint32_t>& keys, int words, int* valid) {
    int count = (int)keys.size();
    Buffers dev;
    CUDA_TRY(cudaMalloc(&dev.msgs, msgs.size() * 4));
    CUDA_TRY(cudaMalloc(&dev.keys, keys.size() * 4));
    CUDA_TRY(cudaMalloc(&dev.out, keys.size() * 4));
    CUDA_TRY(cudaMemcpy(dev.msgs, msgs.data(), msgs.size() * 4, cudaMemcpyHostToDevice));
    CUDA_TRY(cudaMemcpy(dev.keys, keys.data(), keys.size() * 4, cudaMemcpyHostToDevice));
    fold<<<(count + 255) / 256, 256>>>(dev.msgs, dev.keys, dev.out, words, count);
    std::vector<uint32_t> host(count);
    CUDA_TRY(cudaMemcpy(host.data(), dev.out, count * 4, cudaMemcpyDeviceToHost));
    *valid = 0;
    for (int i = 0; i < count; ++i) {
        if (host[i] == 0) return Result::kBadBatch;
        *valid += host[i] & 1;
    }
    dev.release();
    return Result::kOk;
}

int main(int argc, char** argv) {
    g_fixed = argc > 1 && !strcmp(argv[1], "--fixed");
    const int count = 1 << 20, words = 48;
    std::vector<uint32_t> msgs((size_t)count * words), keys(count);
    for (size_t i = 0; i < msgs.size(); ++i) msgs[i] = (uint32_t)(i * 2654435761u) | 1u;
    int accepted = 0, rejected = 0;
    for (int batch = 0; batch < 48; ++batch) {
        for (int i = 0; i < count; ++i) keys[i] = (uint32_t)(i + batch);
        if (batch % 2) {
            for (int w = 0; w < words; ++w) msgs[(size_t)17 * words + w] = 0;
            keys[17] = 0;
        } else {
            msgs[(size_t)17 * words] = 5;
        }
        int valid = 0;
        (verify(msgs, keys, words, &valid) == Result::kOk ? accepted : rejected)++;
        if (batch % 12 == 11) {
            size_t free_b = 0, total_b = 0;
            cudaMemGetInfo(&free_b, &total_b);
            printf("batch %d accepted %d rejected %d card in use %zu MiB\n", batch, accepted, rejected,
                   (total_b - free_b) >> 20);
        }
    }
    return 0;
}

// Image tiles of changing size served from an arena that grows in steps, is reused, and is released at the end.
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                         \
    do {                                                                                    \
        cudaError_t status_ = (call);                                                       \
        if (status_ != cudaSuccess) {                                                       \
            fprintf(stderr, "%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(status_)); \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

class Arena {
public:
    ~Arena() {
        for (auto& chunk : chunks_) cudaFree(chunk.base);
    }
    void* take(size_t bytes) {
        bytes = (bytes + 511) & ~size_t(511);
        for (auto& chunk : chunks_) {
            if (chunk.used + bytes <= chunk.size) {
                void* p = chunk.base + chunk.used;
                chunk.used += bytes;
                return p;
            }
        }
        size_t size = bytes > kChunk ? bytes : kChunk;
        Chunk chunk{nullptr, size, bytes};
        CHECK(cudaMalloc(&chunk.base, size));
        chunks_.push_back(chunk);
        return chunk.base;
    }
    void reset() {
        for (auto& chunk : chunks_) chunk.used = 0;
    }
    size_t held() const {
        size_t total = 0;
        for (auto& chunk : chunks_) total += chunk.size;
        return total;
    }

private:
    static constexpr size_t kChunk = size_t(256) << 20;
    struct Chunk {
        char* base;
        size_t size, used;
    };
    std::vector<Chunk> chunks_;
};

__global__ void blur(const float* in, float* out, int width, int height) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= width * height) return;
    int x = i % width;
    out[i] = (in[i] + (x ? in[i - 1] : in[i]) + (x + 1 < width ? in[i + 1] : in[i])) / 3.0f;
}

int main() {
    Arena arena;
    for (int frame = 0; frame < 400; ++frame) {
        arena.reset();
        int tiles = 4 + frame % 9, width = 2048 + 512 * (frame % 5), height = 2048;
        for (int t = 0; t < tiles; ++t) {
            size_t bytes = size_t(width) * height * sizeof(float);
            float* in = (float*)arena.take(bytes);
            float* out = (float*)arena.take(bytes);
            CHECK(cudaMemsetAsync(in, t, bytes));
            blur<<<(width * height + 255) / 256, 256>>>(in, out, width, height);
        }
        CHECK(cudaDeviceSynchronize());
        if (frame % 80 == 0) printf("frame %d tiles %d held %zu MiB\n", frame, tiles, arena.held() >> 20);
    }
    return 0;
}

/* Nanoseconds of a driver call that gives nothing out, of a pair of allocation and free, and of such a pair in the stand-in for PyTorch's
 * allocator: each the best of some rounds, so that whatever else the machine does counts for little. */
#include "../programs/api.h"

#include <time.h>

int cuCtxSetLimit(int, size_t);
void *fake_torch_empty(size_t);
void fake_torch_delete(void *);

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e9 + t.tv_nsec;
}

static void ask(void)
{
    OK(cuCtxSetLimit(0, 1024));
}

static void give(void)
{
    CUdeviceptr at;
    OK(cuMemAlloc_v2(&at, 4096));
    OK(cuMemFree_v2(at));
}

static void block(void)
{
    fake_torch_delete(fake_torch_empty(1000));
}

static double best_of(void (*what)(void))
{
    enum { ROUNDS = 200, CALLS = 1000 };
    double best = 1e18;
    for (int round = 0; round < ROUNDS; round++) {
        double began = now();
        for (int i = 0; i < CALLS; i++) what();
        double took = (now() - began) / CALLS;
        if (took < best) best = took;
    }
    return best;
}

int main(void)
{
    void *context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    fake_torch_empty(1 << 20);
    printf("%.1f %.1f %.1f\n", best_of(ask), best_of(give), best_of(block));
    return 0;
}

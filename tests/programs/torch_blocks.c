//! Tensors of the stand-in for PyTorch: sharing of segments, a second stream, growth, out of memory, the cache given back.
//# Link: torch
//# Env: FAKE_CUDA_MEMORY=256MiB
//# Expect: cuMemAlloc_v2 2097152 leaked x2
//# Expect: cuMemAlloc_v2 20971520 freed
//# Expect: cuMemAlloc_v2 104857600 freed
//# Expect: cuMemAlloc_v2 209715200 failed:2
//# Expect: cuMemAlloc_v2 209715200 leaked
//# Expect: cuMemAlloc_v2 1073741824 failed:2 x2
#include "api.h"

void *fake_torch_empty(size_t);
void fake_torch_delete(void *), fake_torch_set_stream(int64_t), fake_torch_empty_cache(void);

int main(void)
{
    void *first = fake_torch_empty(1000), *second = fake_torch_empty(5000), *other;
    CHECK(first && (char *)second - (char *)first == 1024); /* one segment of 2 MiB */
    fake_torch_delete(first);
    CHECK(fake_torch_empty(100) == first); /* the smallest hole */
    fake_torch_set_stream(7);
    CHECK((other = fake_torch_empty(1000)) && other != first); /* streams do not share */
    fake_torch_set_stream(0);

    void *medium = fake_torch_empty(5 * MIB), *beside = fake_torch_empty(5 * MIB);
    CHECK((char *)beside - (char *)medium == 5 * MIB); /* one segment of 20 MiB */
    void *large = fake_torch_empty(100 * MIB);
    fake_torch_delete(medium);
    fake_torch_delete(beside);
    fake_torch_delete(large);
    CHECK(fake_torch_empty(200 * MIB)); /* fails once, gives the cache back, works */
    CHECK(fake_torch_empty(GIB) == NULL);
    fake_torch_empty_cache();
    return 0;
}

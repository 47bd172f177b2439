//! Which addresses the fake driver hands out: the rules of tests/fake-cuda/driver/space.c one by one. With a file of operations
//! (`op,id,bytes,address`, as a real driver answered them) it repeats those and prints how many answers agree.
//# Link: cuda
//# Env: FAKE_CUDA_MEMORY=140GiB
//# Expect: cuMemAlloc_v2 20971520 freed x2
//# Expect: cuMemAlloc_v2 4194304 freed x2
//# Expect: cuMemAlloc_v2 2097152 freed x2
//# Expect: cuMemAlloc_v2 33554432 freed
//# Expect: cuMemAlloc_v2 512 freed
//# Expect: cuMemAlloc_v2 1000 freed x7
//# Expect: cuMemAlloc_v2 2096000 freed
#include "api.h"

#define REGION (32 * MIB)
static CUdeviceptr *by_id;

static CUdeviceptr take(size_t bytes)
{
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, bytes));
    return p;
}

/* Is the range around `p` a mapping of the process without access rights? */
static int reserved(CUdeviceptr p)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long long start, end;
    char rights[8], line[512];
    int found = 0;
    while (fgets(line, sizeof line, maps))
        if (sscanf(line, "%llx-%llx %7s", &start, &end, rights) == 3 && p >= start && p < end)
            found = strncmp(rights, "---p", 4) == 0;
    fclose(maps);
    return found;
}

static void large(void)
{
    CUdeviceptr a = take(20 * MIB);
    CHECK(a % REGION == 0 && reserved(a));       /* the start of a region of its own */
    CUdeviceptr b = take(4 * MIB);
    CHECK(b == a + 20 * MIB);                    /* the hole behind it */
    CUdeviceptr c = take(32 * MIB);
    CHECK(c == a - REGION);                      /* the next region, below */
    CUdeviceptr d = take(20 * MIB);
    CHECK(d == c - REGION);
    CUdeviceptr e = take(2 * MIB);
    CHECK(e == d + 20 * MIB);                    /* the newest region first */
    OK(cuMemFree_v2(d));
    CHECK(take(4 * MIB) == e + 2 * MIB);         /* there the smallest hole: 10 MiB behind e, 20 before */
    CHECK(take(2 * MIB) == e + 6 * MIB);
    OK(cuMemFree_v2(e + 2 * MIB));
    OK(cuMemFree_v2(e + 6 * MIB));
    OK(cuMemFree_v2(e));
    CHECK(!reserved(d));                         /* an empty region goes back */
    OK(cuMemFree_v2(a));
    OK(cuMemFree_v2(b));
    OK(cuMemFree_v2(c));
}

static void small(void)
{
    CUdeviceptr p[4];
    for (int i = 0; i < 4; i++) p[i] = take(1000);
    CHECK(p[0] % (2 * MIB) == 0 && p[1] == p[0] + 1024 && p[3] == p[0] + 3 * 1024); /* 512-byte units of one block */
    OK(cuMemFree_v2(p[2]));
    OK(cuMemFree_v2(p[0]));
    CHECK(take(1000) == p[2]);                   /* two equal holes: the older one */
    CHECK(take(512) == p[0]);                    /* the smallest that fits */
    CUdeviceptr q = take(2096000);
    CHECK(q / (2 * MIB) != p[0] / (2 * MIB));    /* does not fit any more */
    OK(cuMemFree_v2(p[0]));
    CHECK(take(1000) == q + 2096128);            /* the block's last 1024 bytes have been free for longer */
    OK(cuMemFree_v2(q + 2096128));
    CHECK(take(1000) == p[0]);                   /* now these have */
    for (int i = 0; i < 4; i++) OK(cuMemFree_v2(p[i]));
    OK(cuMemFree_v2(q));
}

/* The real context has taken part of the first regions: all but 2 MiB of one, where the first small block lies, and 8 MiB of
 * another. 512 bytes stay taken here to keep that small block. */
static CUdeviceptr prepare(void)
{
    take(30 * MIB);
    CUdeviceptr keeper = take(512);
    take(8 * MIB);
    return keeper;
}

static void repeat(const char *path)
{
    FILE *file = fopen(path, "r");
    char line[128], op[16];
    unsigned long id;
    size_t bytes, total = 0, equal = 0;
    unsigned long long address;
    CHECK(file && (by_id = calloc(100000, sizeof *by_id)) && fgets(line, sizeof line, file));
    CUdeviceptr kept_block = prepare() / (2 * MIB);
    while (fgets(line, sizeof line, file)) {
        CHECK(sscanf(line, "%15[a-z],%lu,%zu,%llx", op, &id, &bytes, &address) == 4 && id < 100000);
        if (strcmp(op, "free") == 0) {
            OK(cuMemFree_v2(by_id[id]));
        } else if (strcmp(op, "malloc") == 0) {
            by_id[id] = take(bytes);
            CUdeviceptr comparable = by_id[id] - (by_id[id] / (2 * MIB) == kept_block ? 512 : 0);
            total++;
            equal += comparable % REGION == address % REGION;
        }
    }
    printf("%zu of %zu\n", equal, total);
    fclose(file);
}

int main(int argc, char **argv)
{
    void *context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    if (argc > 1) {
        repeat(argv[1]);
        return 0;
    }
    large();
    small();
    return 0;
}

/* The usage file that the fake driver writes and the fake NVML reads. See usage.c for the environment. */
#ifndef FAKE_CUDA_USAGE_H
#define FAKE_CUDA_USAGE_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define USAGE_SLOTS 256
#define USAGE_DEVICES 16

struct usage_slot {
    int64_t pid; /* 0: free */
    uint64_t is_client; /* of MPS */
    uint64_t state; /* CUprocessState: see checkpoint.c */
    uint64_t used[USAGE_DEVICES];
};
enum { PROCESS_RUNNING = 0, PROCESS_LOCKED = 1, PROCESS_CHECKPOINTED = 2 };
struct usage_file {
    struct usage_slot slots[USAGE_SLOTS];
};

static inline size_t usage_parse_bytes(const char *text, size_t fallback)
{
    char *unit;
    if (!text || !*text) return fallback;
    double number = strtod(text, &unit);
    size_t scale = 1;
    switch (*unit) {
    case 'K': scale = (size_t)1 << 10; break;
    case 'M': scale = (size_t)1 << 20; break;
    case 'G': scale = (size_t)1 << 30; break;
    case 'T': scale = (size_t)1 << 40; break;
    }
    return (size_t)(number * (double)scale);
}

static inline size_t usage_capacity(void)
{
    static size_t capacity;
    if (!capacity) capacity = usage_parse_bytes(getenv("FAKE_CUDA_MEMORY"), (size_t)8 << 30);
    return capacity;
}

/* The shared file, or private memory when there is none. */
static inline struct usage_file *usage_open(void)
{
    const char *path = getenv("FAKE_CUDA_STATE");
    int fd = -1, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (path && *path) {
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (fd < 0 || ftruncate(fd, sizeof(struct usage_file)) != 0) {
            fprintf(stderr, "fake CUDA: FAKE_CUDA_STATE=%s: %s; not shared\n", path, strerror(errno));
            if (fd >= 0) close(fd);
            fd = -1;
        } else {
            flags = MAP_SHARED;
        }
    }
    void *map = mmap(NULL, sizeof(struct usage_file), PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0) close(fd);
    if (map == MAP_FAILED) {
        perror("fake CUDA: mapping the usage file");
        abort();
    }
    return map;
}

static inline int usage_alive(const struct usage_slot *slot)
{
    int64_t pid = __atomic_load_n(&slot->pid, __ATOMIC_SEQ_CST);
    return pid > 0 && (kill((pid_t)pid, 0) == 0 || errno == EPERM);
}

static inline struct usage_slot *usage_claim(struct usage_file *file)
{
    for (int i = 0; i < USAGE_SLOTS; i++) {
        struct usage_slot *slot = &file->slots[i];
        int64_t old = slot->pid;
        if (old == -1 || (old != 0 && old != getpid() && usage_alive(slot))) continue; /* ours: from before an exec */
        if (!__atomic_compare_exchange_n(&slot->pid, &old, -1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
        memset(slot->used, 0, sizeof slot->used);
        slot->state = PROCESS_RUNNING;
        slot->is_client = getenv("FAKE_CUDA_MPS") != NULL;
        __atomic_store_n(&slot->pid, getpid(), __ATOMIC_SEQ_CST);
        return slot;
    }
    fprintf(stderr, "fake CUDA: the usage file has only %d slots\n", USAGE_SLOTS);
    abort();
}

static inline size_t usage_sum(const struct usage_file *file, int device)
{
    size_t sum = 0;
    for (int i = 0; i < USAGE_SLOTS; i++)
        if (file->slots[i].pid != 0 && file->slots[i].state != PROCESS_CHECKPOINTED && usage_alive(&file->slots[i]))
            sum += __atomic_load_n(&file->slots[i].used[device], __ATOMIC_SEQ_CST);
    return sum;
}

#endif

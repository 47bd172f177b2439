/* Where the ranks of a job meet: one file in /dev/shm for each communicator, all zeros when it is new. It knows nothing of NCCL but
 * that ranks come, make collectives in an order, and send to each other. Without FAKE_NCCL_JOB nobody ever waits. */
#ifndef FAKE_NCCL_MEET_H
#define FAKE_NCCL_MEET_H

#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MEET_RANKS 64
#define MEET_SPLITS 64
#define MEET_REMEMBERED 4096 /* collectives whose signatures are compared */

enum meet_end { MEET_DONE = 0, MEET_TIMED_OUT = 2, MEET_ABORTED = 3 };

struct meeting {
    _Atomic uint64_t come;                                         /* a bit a rank */
    _Atomic uint64_t collectives[MEET_RANKS];                      /* made by each rank */
    _Atomic uint64_t signatures[MEET_RANKS][MEET_REMEMBERED];
    _Atomic uint64_t starts[MEET_RANKS][MEET_REMEMBERED];          /* when its kernel began to wait for the others, FAKE_NCCL_KERNEL */
    _Atomic uint64_t sent[MEET_RANKS][MEET_RANKS];                 /* from, to */
    _Atomic uint64_t received[MEET_RANKS][MEET_RANKS];             /* from, to */
    _Atomic uint64_t split[MEET_SPLITS][MEET_RANKS];               /* 1 + color + 1 in the high half, key in the low one */
};

static inline const char *meet_job(void)
{
    const char *job = getenv("FAKE_NCCL_JOB");
    return job && *job ? job : NULL;
}

static inline uint64_t meet_mix(uint64_t hash, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

/* The file of a communicator; NULL without a job. */
static inline struct meeting *meet_open(uint64_t key)
{
    char path[256];
    if (!meet_job()) return NULL;
    snprintf(path, sizeof path, "/dev/shm/fake-nccl.%s.%016llx", meet_job(), (unsigned long long)key);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(struct meeting)) != 0) {
        perror(path);
        if (fd >= 0) close(fd);
        return NULL;
    }
    void *map = mmap(NULL, sizeof(struct meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return map == MAP_FAILED ? NULL : map;
}

/* Waits until `is_so` is, a rank of the communicator gave up, or too much time went by. */
#define MEET_WAIT(is_so, is_over)                                                                            \
    ({                                                                                                       \
        const char *limit_text = getenv("FAKE_NCCL_TIMEOUT");                                                \
        double limit = limit_text && *limit_text ? atof(limit_text) : 1800;                                  \
        enum meet_end end = MEET_DONE;                                                                       \
        for (double waited = 0; !(is_so); waited += 0.0002) {                                                \
            if (is_over) { end = MEET_ABORTED; break; }                                                      \
            if (waited > limit) { end = MEET_TIMED_OUT; break; }                                             \
            nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);                                          \
        }                                                                                                    \
        end;                                                                                                 \
    })

static inline bool meet_all_came(struct meeting *meeting, int ranks)
{
    return __builtin_popcountll(atomic_load(&meeting->come)) >= ranks;
}

static inline void meet_collective(struct meeting *meeting, int rank, uint64_t signature)
{
    uint64_t number = atomic_load(&meeting->collectives[rank]);
    atomic_store(&meeting->signatures[rank][number % MEET_REMEMBERED], signature);
    atomic_store(&meeting->collectives[rank], number + 1);
}

/* Whether every collective that `rank` made was made by all, and alike. */
static inline bool meet_collectives_complete(struct meeting *meeting, int rank, int ranks)
{
    uint64_t n = atomic_load(&meeting->collectives[rank]);
    uint64_t first = n > MEET_REMEMBERED / 2 ? n - MEET_REMEMBERED / 2 : 0;
    for (int other = 0; other < ranks; other++) {
        if (atomic_load(&meeting->collectives[other]) < n) return false;
        for (uint64_t number = first; number < n; number++) {
            uint64_t at = number % MEET_REMEMBERED;
            if (atomic_load(&meeting->signatures[other][at]) != atomic_load(&meeting->signatures[rank][at])) return false;
        }
    }
    return true;
}

/* Whether what `rank` sent was received, and what it wants was sent. */
static inline bool meet_messages_complete(struct meeting *meeting, int rank, int ranks)
{
    for (int other = 0; other < ranks; other++) {
        if (atomic_load(&meeting->sent[rank][other]) > atomic_load(&meeting->received[rank][other])) return false;
        if (atomic_load(&meeting->received[other][rank]) > atomic_load(&meeting->sent[other][rank])) return false;
    }
    return true;
}

#endif

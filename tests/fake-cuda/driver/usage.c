/* How much of each device is used, and by whom.
 *
 *   FAKE_CUDA_MEMORY=80GiB   capacity of each device (default 8GiB; KiB, MiB, GiB, TiB or plain bytes)
 *   FAKE_CUDA_CONTEXT=0      what the first context of a process takes on its device (default 0)
 *   FAKE_CUDA_STATE=file     processes that name the same file share the devices, and the fake NVML reads it;
 *                            without it every process has the devices for itself
 *   FAKE_CUDA_MPS=1          the process is a client of MPS, and CUDA_MPS_PINNED_DEVICE_MEM_LIMIT holds
 *
 * The file is an array of slots, one per process, claimed by writing the pid; the sum over living processes is what is used.
 * Layout shared with ../nvml.c through usage.h. */
#define _GNU_SOURCE
#include "device.h"
#include "usage.h"
#include "fake.h"

#include <pthread.h>
#include <stdlib.h>

static struct usage_file *file;
static struct usage_slot *mine;

static struct usage_slot *slot(void)
{
    if (!file) file = usage_open();
    if (!mine) mine = usage_claim(file);
    return mine;
}

/* CUDA numbers what a process sees from 0. */
static int place(int device)
{
    static int only = -2;
    if (only == -2) only = device_env_only();
    return only < 0 ? device : only;
}

void usage_forget_in_child(void) { mine = NULL; }

/* The slot of another process, or of this one; NULL where it has none. */
static struct usage_slot *slot_of(int pid)
{
    if (pid == getpid()) return slot();
    if (!file) file = usage_open();
    for (int i = 0; i < USAGE_SLOTS; i++)
        if (file->slots[i].pid == pid && usage_alive(&file->slots[i])) return &file->slots[i];
    return NULL;
}

int usage_state(int pid)
{
    struct usage_slot *slot = slot_of(pid);
    return slot ? (int)slot->state : -1;
}

/* What a process that comes back does not get is refused. */
bool usage_change_state(int pid, int from, int to)
{
    struct usage_slot *slot = slot_of(pid);
    if (!slot || (int)slot->state != from) return false;
    slot->state = (uint64_t)to;
    for (int i = 0; i < USAGE_DEVICES; i++) {
        if (usage_sum(file, i) <= usage_capacity()) continue;
        slot->state = (uint64_t)from;
        return false;
    }
    return true;
}

size_t device_total(int device)
{
    (void)device;
    return usage_capacity();
}

size_t device_free(int device)
{
    slot();
    size_t used = usage_sum(file, place(device)), total = device_total(device);
    return used < total ? total - used : 0;
}

/* "0=1G,1=512M": what a client of MPS may have of a device (MPS guide, environment variables). */
static size_t limit_of(int device)
{
    const char *text = mine->is_client ? getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") : NULL;
    for (; text && *text; text = strchr(text, ',') ? strchr(text, ',') + 1 : NULL) {
        const char *bytes = strchr(text, '=');
        if (bytes && atoi(text) == device) return usage_parse_bytes(bytes + 1, SIZE_MAX);
    }
    return SIZE_MAX;
}

/* Adds first and looks afterwards, so that two processes cannot both get the last bytes. */
bool device_charge(int device, size_t bytes)
{
    size_t mine_then = __atomic_add_fetch(&slot()->used[place(device)], bytes, __ATOMIC_SEQ_CST);
    if (mine_then <= limit_of(device) && usage_sum(file, place(device)) <= device_total(device)) return true;
    device_refund(device, bytes);
    return false;
}

void device_refund(int device, size_t bytes)
{
    __atomic_fetch_sub(&slot()->used[place(device)], bytes, __ATOMIC_SEQ_CST);
}

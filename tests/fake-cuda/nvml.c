/* libnvidia-ml.so.1: what an outside observer sees of the fake devices. With FAKE_CUDA_STATE set, that is every process that
 * names the same file; without it, nothing is used. Prototypes and layouts: nvml.h 12.9. */
#include "driver/device.h"
#include "driver/usage.h"

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10 };

typedef struct { int index; } *nvmlDevice_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned pid; unsigned long long used; } process_v1;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_v2;
typedef struct {
    char legacy_id[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char id[32];
} nvmlPciInfo_t;

/* Cards, and instances of cards that are in MIG mode. */
static struct { int index; } devices[DEVICE_LIMIT], instances[DEVICE_LIMIT];
static struct usage_file *file;
static int users;

static int index_of(nvmlDevice_t device)
{
    for (int i = 0; i < device_cards(); i++)
        if ((void *)device == (void *)&devices[i]) return i;
    return -1;
}

static int instance_of(nvmlDevice_t device)
{
    for (int i = 0; device_env_mig() && i < device_env_count(); i++)
        if ((void *)device == (void *)&instances[i]) return i;
    return -1;
}

/* `index` is that of a card, `place` that of a MIG instance or of a card in which there is none; -1 where there is none. */
#define CHECKED(device, out)                                                                                 \
    int instance = instance_of(device), index = instance < 0 ? index_of(device) : device_card(instance);     \
    int place = device_env_mig() ? instance : index;                                                         \
    (void)place;                                                                                             \
    if (!users) return UNINITIALIZED;                                                                        \
    if (index < 0 || !(out)) return INVALID_ARGUMENT

/* A card in MIG mode tells the sum of its instances to the privileged only (nvml.h, nvmlDeviceGetMemoryInfo and others). */
#define CHECKED_PLACE(device, out)                                                                           \
    CHECKED(device, out);                                                                                    \
    if (place < 0) return NO_PERMISSION

EXPORT int nvmlInit_v2(void)
{
    if (!file) file = usage_open();
    users++;
    return SUCCESS;
}
EXPORT int nvmlInit(void) { return nvmlInit_v2(); }
EXPORT int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return nvmlInit_v2();
}
EXPORT int nvmlShutdown(void)
{
    if (!users) return UNINITIALIZED;
    users--;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int result)
{
    switch (result) {
    case SUCCESS: return "Success";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case TIMEOUT: return "Timeout";
    default: return "Unknown Error";
    }
}

EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned length)
{
    if (!out) return INVALID_ARGUMENT;
    if (length < 12) return INSUFFICIENT_SIZE;
    snprintf(out, length, "000.00.fake");
    return SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion(int *out)
{
    if (!out) return INVALID_ARGUMENT;
    *out = device_env_driver_version();
    return SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

EXPORT int nvmlDeviceGetCount_v2(unsigned *out)
{
    if (!users) return UNINITIALIZED;
    if (!out) return INVALID_ARGUMENT;
    *out = (unsigned)device_cards();
    return SUCCESS;
}
EXPORT int nvmlDeviceGetCount(unsigned *out) { return nvmlDeviceGetCount_v2(out); }

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out)
{
    if (!users) return UNINITIALIZED;
    if (!out || index >= (unsigned)device_cards()) return INVALID_ARGUMENT;
    *out = (nvmlDevice_t)&devices[index];
    return SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *out)
{
    return nvmlDeviceGetHandleByIndex_v2(index, out);
}

static void text_of(int card, int instance, char out[UUID_TEXT])
{
    unsigned char uuid[16];
    if (instance < 0) card_uuid(card, uuid);
    else device_uuid(instance, uuid);
    uuid_text(instance < 0 ? "GPU" : "MIG", uuid, out);
}

EXPORT int nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned length)
{
    char text[UUID_TEXT];
    CHECKED(device, out);
    text_of(index, instance, text);
    if (length <= strlen(text)) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    CHECKED(device, current && pending);
    if (instance >= 0 || !device_env_mig()) return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *out)
{
    CHECKED(device, out);
    *out = instance < 0 ? (unsigned)device_env_mig() : 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned number, nvmlDevice_t *out)
{
    CHECKED(device, out);
    if (!device_env_mig()) return NOT_SUPPORTED;
    int which = index * device_env_mig() + (int)number;
    if (instance >= 0 || number >= (unsigned)device_env_mig()) return INVALID_ARGUMENT;
    if (which >= device_env_count()) return NOT_FOUND;
    *out = (nvmlDevice_t)&instances[which];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *out)
{
    CHECKED(device, out);
    if (instance < 0) return INVALID_ARGUMENT;
    *out = (nvmlDevice_t)&devices[index];
    return SUCCESS;
}

EXPORT int nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *out)
{
    CHECKED(device, out);
    *out = instance >= 0;
    return SUCCESS;
}

/* FAKE_NVML_MIG=unknown: no instance by its UUID, as drivers before R470. */
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *out)
{
    char text[UUID_TEXT];
    const char *how = getenv("FAKE_NVML_MIG");
    if (!users) return UNINITIALIZED;
    if (!uuid || !out) return INVALID_ARGUMENT;
    for (int i = 0; i < device_cards(); i++) {
        text_of(i, -1, text);
        if (strcmp(text, uuid) == 0) return nvmlDeviceGetHandleByIndex_v2((unsigned)i, out);
    }
    for (int i = 0; device_env_mig() && !how && i < device_env_count(); i++) {
        text_of(-1, i, text);
        if (strcmp(text, uuid) != 0) continue;
        *out = (nvmlDevice_t)&instances[i];
        return SUCCESS;
    }
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *out)
{
    unsigned domain, bus, slot;
    if (!users) return UNINITIALIZED;
    if (!id || !out || sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) return INVALID_ARGUMENT;
    for (int i = 0; i < device_cards(); i++)
        if ((int)bus == i + 1) return nvmlDeviceGetHandleByIndex_v2((unsigned)i, out);
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *out)
{
    return nvmlDeviceGetHandleByPciBusId_v2(id, out);
}

EXPORT int nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    CHECKED(device, major && minor);
    *major = 9;
    *minor = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t peer, int capability, int *out)
{
    CHECKED(device, out);
    if (index_of(peer) < 0) return INVALID_ARGUMENT;
    *out = capability == 0 || capability == 1 ? 0 : 4; /* reads and writes: OK; the rest: NOT_SUPPORTED */
    return SUCCESS;
}

EXPORT int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *out)
{
    CHECKED(device, out);
    *out = (unsigned)index;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned length)
{
    CHECKED(device, out);
    if (length < sizeof DEVICE_NAME + 16) return INSUFFICIENT_SIZE;
    if (instance < 0) strcpy(out, DEVICE_NAME);
    else device_name(out, length);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out)
{
    CHECKED(device, out);
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)index + 1;
    snprintf(out->legacy_id, sizeof out->legacy_id, "0000:%02X:00.0", out->bus);
    snprintf(out->id, sizeof out->id, "00000000:%02X:00.0", out->bus);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out)
{
    CHECKED_PLACE(device, out);
    out->total = usage_capacity();
    out->used = usage_sum(file, place);
    out->free = out->total - out->used;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
    CHECKED_PLACE(device, out);
    out->total = usage_capacity();
    out->reserved = 0;
    out->used = usage_sum(file, place);
    out->free = out->total - out->used;
    return SUCCESS;
}

/* FAKE_NVML_PIDS=offset:N: as inside of a container, whose processes have other numbers for the driver. */
static unsigned number_of(const struct usage_slot *slot)
{
    const char *how = getenv("FAKE_NVML_PIDS");
    unsigned offset = 0;
    if (how) sscanf(how, "offset:%u", &offset);
    return (unsigned)slot->pid + offset;
}

/* Every living process with memory on the device, or every client of MPS; `count` is how many fit, and comes back as how many there
 * are. */
static int processes(nvmlDevice_t device, unsigned *count, char *out, size_t stride, int clients)
{
    unsigned found = 0, room = count ? *count : 0;
    CHECKED_PLACE(device, count);
    for (int i = 0; i < USAGE_SLOTS; i++) {
        const struct usage_slot *slot = &file->slots[i];
        if (!slot->pid || !usage_alive(slot) || !slot->used[place] || slot->state == PROCESS_CHECKPOINTED) continue;
        if (clients && !slot->is_client) continue;
        if (out && found < room) {
            unsigned part = instance < 0 ? ~0u : (unsigned)instance;
            process_v2 process = {number_of(slot), slot->used[place], part, part};
            memcpy(out + found * stride, &process, stride);
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count, process_v1 *out)
{
    return processes(device, count, (char *)out, sizeof *out, 0);
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count, process_v2 *out)
{
    return processes(device, count, (char *)out, sizeof *out, 0);
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, process_v2 *out)
{
    return processes(device, count, (char *)out, sizeof *out, 0);
}
EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, process_v2 *out)
{
    return processes(device, count, (char *)out, sizeof *out, 1);
}

/* The first word of the command line, as drivers do. */
EXPORT int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned length)
{
    char path[64];
    if (!users) return UNINITIALIZED;
    if (!out || !length) return INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *from = fopen(path, "r");
    if (!from) return NOT_FOUND;
    size_t n = fread(out, 1, length - 1, from);
    out[n] = 0;
    fclose(from);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, process_v2 *out)
{
    (void)out;
    CHECKED(device, count);
    *count = 0;
    return SUCCESS;
}

/* FAKE_NVML_FAULTS=FILE: faults of cards, a line each, which a test may add while programs run: `xid CARD NUMBER` is an event for
 * every set that was made before, `field CARD ID VALUE` what a field of that card has from then on. */
typedef struct { FILE *from; unsigned long long types; } *nvmlEventSet_t;
typedef struct {
    nvmlDevice_t device;
    unsigned long long type, data;
    unsigned gpu_instance, compute_instance;
} nvmlEventData_t;
typedef struct {
    unsigned id, scope;
    long long timestamp, latency;
    int type, result;
    unsigned long long value;
} nvmlFieldValue_t;
enum { XID_CRITICAL_ERROR = 8, UNSIGNED_LONG_LONG = 3 };

static FILE *faults(void)
{
    const char *path = getenv("FAKE_NVML_FAULTS");
    return path && *path ? fopen(path, "re") : NULL;
}

EXPORT int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *out)
{
    CHECKED(device, out);
    *out = XID_CRITICAL_ERROR;
    return SUCCESS;
}
EXPORT int nvmlEventSetCreate(nvmlEventSet_t *out)
{
    if (!users) return UNINITIALIZED;
    *out = calloc(1, sizeof **out);
    if ((*out)->from = faults(), (*out)->from) fseek((*out)->from, 0, SEEK_END);
    return SUCCESS;
}
EXPORT int nvmlEventSetFree(nvmlEventSet_t set)
{
    if (set->from) fclose(set->from);
    free(set);
    return SUCCESS;
}
EXPORT int nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    CHECKED(device, set);
    if (types & ~(unsigned long long)XID_CRITICAL_ERROR) return NOT_SUPPORTED;
    set->types |= types;
    return SUCCESS;
}
EXPORT int nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *out, unsigned milliseconds)
{
    char line[128];
    unsigned card;
    unsigned long long number;
    for (;; usleep(1000)) {
        if (!set->from) set->from = faults();
        if (set->from) clearerr(set->from);
        while (set->from && fgets(line, sizeof line, set->from)) {
            if (sscanf(line, "xid %u %llu", &card, &number) != 2 || !set->types || card >= (unsigned)device_cards()) continue;
            *out = (nvmlEventData_t){(nvmlDevice_t)&devices[card], XID_CRITICAL_ERROR, number, ~0u, ~0u};
            return SUCCESS;
        }
        if (!milliseconds--) return TIMEOUT;
    }
}
EXPORT int nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *out, unsigned milliseconds)
{
    return nvmlEventSetWait_v2(set, out, milliseconds);
}

EXPORT int nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
    char line[128];
    unsigned card, id;
    unsigned long long number;
    CHECKED(device, values);
    FILE *from = faults();
    if (!from) return NOT_SUPPORTED;
    for (int i = 0; i < count; i++) values[i].type = UNSIGNED_LONG_LONG, values[i].result = SUCCESS, values[i].value = 0;
    while (fgets(line, sizeof line, from))
        for (int i = 0; i < count && sscanf(line, "field %u %u %llu", &card, &id, &number) == 3; i++)
            if ((int)card == index && id == values[i].id) values[i].value = number;
    fclose(from);
    return SUCCESS;
}

/* Asked for by PyTorch (c10/cuda/driver_api.h), NCCL (misc/nvmlwrap.cc) and torch.cuda's own queries; a fake device has none of this. */
#define ABSENT(name)                                                                                         \
    EXPORT int name(void);                                                                                   \
    EXPORT int name(void) { return users ? NOT_SUPPORTED : UNINITIALIZED; }
ABSENT(nvmlDeviceGetClockInfo)
ABSENT(nvmlDeviceGetGpuFabricInfoV)
ABSENT(nvmlDeviceGetNvLinkCapability)
ABSENT(nvmlDeviceGetNvLinkRemoteDeviceType)
ABSENT(nvmlDeviceGetNvLinkRemotePciInfo)
ABSENT(nvmlDeviceGetNvLinkRemotePciInfo_v2)
ABSENT(nvmlDeviceGetNvLinkState)
ABSENT(nvmlDeviceGetPowerUsage)
ABSENT(nvmlDeviceGetTemperature)
ABSENT(nvmlDeviceGetUtilizationRates)
ABSENT(nvmlSystemGetConfComputeSettings)
ABSENT(nvmlSystemGetConfComputeState)

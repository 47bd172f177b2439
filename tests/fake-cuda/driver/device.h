/* What every fake library says about a device, so that the driver and NVML agree. */
#ifndef FAKE_CUDA_DEVICE_H
#define FAKE_CUDA_DEVICE_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICE_NAME "Fake GPU"
#define DEVICE_LIMIT 16
/* "MIG-" or "GPU-", 32 digits, four hyphens, and the end. */
#define UUID_TEXT 41

static inline int device_env_count(void)
{
    const char *text = getenv("FAKE_CUDA_DEVICES");
    int count = text ? atoi(text) : 1;
    return count < 0 ? 0 : count > DEVICE_LIMIT ? DEVICE_LIMIT : count;
}

/* Ten times the major number, and the minor. */
static inline int device_env_capability(void)
{
    const char *text = getenv("FAKE_CUDA_CAPABILITY");
    int capability = text ? atoi(text) : 0;
    return capability > 0 ? capability : 90;
}

static inline int device_env_driver_version(void)
{
    const char *text = getenv("FAKE_CUDA_DRIVER");
    return text ? atoi(text) : 13050;
}

/* FAKE_CUDA_MIG=N: the devices are MIG instances, N to a card, each with memory of its own. 0: they are cards. */
static inline int device_env_mig(void)
{
    const char *text = getenv("FAKE_CUDA_MIG");
    int instances = text ? atoi(text) : 0;
    return instances > 0 ? instances : 0;
}

/* The card that a device is on, and how many cards there are. */
static inline int device_card(int device) { return device_env_mig() ? device / device_env_mig() : device; }
static inline int device_cards(void)
{
    return device_env_count() ? device_card(device_env_count() - 1) + 1 : 0;
}

static inline void card_uuid(int card, unsigned char out[16])
{
    memcpy(out, "gputrace-fake\0\0", 15);
    out[15] = (unsigned char)card;
}

static inline void device_uuid(int device, unsigned char out[16])
{
    card_uuid(device, out);
    if (device_env_mig()) out[14] = 'M';
}

static inline void uuid_text(const char *prefix, const unsigned char u[16], char out[UUID_TEXT])
{
    snprintf(out, UUID_TEXT, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", prefix, u[0],
             u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

static inline void device_name(char *out, size_t length)
{
    snprintf(out, length, device_env_mig() ? DEVICE_NAME " MIG 1g.8gb" : DEVICE_NAME);
}

/* A process sees one instance (MIG user guide, CUDA device enumeration): the first, or the one that CUDA_VISIBLE_DEVICES names. Of cards it
 * sees all: -1. */
static inline int device_env_only(void)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!device_env_mig()) return -1;
    for (int i = 0; visible && i < device_env_count(); i++) {
        unsigned char uuid[16];
        char text[UUID_TEXT];
        device_uuid(i, uuid);
        uuid_text("MIG", uuid, text);
        if (strcmp(visible, text) == 0) return i;
    }
    return 0;
}

/* PCI domain 0, this bus, slot 0. */
static inline int device_bus(int device) { return device_card(device) + 1; }

#endif

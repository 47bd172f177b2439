/* What every fake library says about a device, so that the driver and NVML agree. */
#ifndef FAKE_CUDA_DEVICE_H
#define FAKE_CUDA_DEVICE_H

#include <stdlib.h>
#include <string.h>

#define DEVICE_NAME "Fake GPU"
#define DEVICE_LIMIT 16

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

static inline void device_uuid(int device, unsigned char out[16])
{
    memcpy(out, "gputrace-fake\0\0", 15);
    out[15] = (unsigned char)device;
}

/* PCI domain 0, this bus, slot 0. */
static inline int device_bus(int device) { return device + 1; }

#endif

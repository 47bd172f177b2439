/* The self-test in which libcudart and libcuda make sure of each other.
 *
 * libcudart passes its version and the time; the driver answers with an HMAC (RFC 2104) over MD2 (RFC 1319) of versions, process,
 * thread, the addresses of two of its tables, and every device's identity. Without the answer the real libcudart gives up with
 * error 103, so a fake driver that is to run under it has to give it. Shape and key were found out and published by the
 * ZLUDA project (dark_api/src/lib.rs, `integrity_check`); this is written from the RFCs. Nothing outside the fake may use it. */
#define _GNU_SOURCE
#include "validity.h"
#include "fake.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

/* RFC 1319, section 3.2: a permutation made from the digits of pi. */
static const unsigned char PI_TABLE[256] = {
    41,  46,  67,  201, 162, 216, 124, 1,   61,  54,  84,  161, 236, 240, 6,   19,  98,  167, 5,   243, 192, 199,
    115, 140, 152, 147, 43,  217, 188, 76,  130, 202, 30,  155, 87,  60,  253, 212, 224, 22,  103, 66,  111, 24,
    138, 23,  229, 18,  190, 78,  196, 214, 218, 158, 222, 73,  160, 251, 245, 142, 187, 47,  238, 122, 169, 104,
    121, 145, 21,  178, 7,   63,  148, 194, 16,  137, 11,  34,  95,  33,  128, 127, 93,  154, 90,  144, 50,  39,
    53,  62,  204, 231, 191, 247, 151, 3,   255, 25,  48,  179, 72,  165, 181, 209, 215, 94,  146, 42,  172, 86,
    170, 198, 79,  184, 56,  210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4,   241, 69,  157, 112, 89,
    100, 113, 135, 32,  134, 91,  207, 101, 230, 45,  168, 2,   27,  96,  37,  173, 174, 176, 185, 246, 28,  70,
    97,  105, 52,  64,  126, 15,  85,  71,  163, 35,  221, 81,  175, 58,  195, 92,  249, 206, 186, 197, 234, 38,
    44,  83,  13,  110, 133, 40,  132, 9,   211, 223, 205, 244, 65,  129, 77,  82,  106, 220, 55,  200, 108, 193,
    171, 250, 36,  225, 123, 8,   12,  189, 177, 74,  120, 136, 149, 139, 227, 99,  232, 109, 233, 203, 213, 254,
    59,  0,   29,  57,  242, 239, 183, 14,  102, 88,  208, 228, 166, 119, 114, 248, 235, 117, 75,  10,  49,  68,
    80,  180, 143, 237, 31,  26,  219, 153, 141, 51,  159, 17,  131, 20};

struct md2 {
    unsigned char state[48], checksum[16], block[16];
    unsigned filled;
};

static void md2_block(struct md2 *md, const unsigned char block[16])
{
    unsigned char last = md->checksum[15];
    for (int i = 0; i < 16; i++) {
        md->state[16 + i] = block[i];
        md->state[32 + i] = md->state[i] ^ block[i];
        last = md->checksum[i] ^= PI_TABLE[block[i] ^ last];
    }
    unsigned t = 0;
    for (unsigned round = 0; round < 18; round++) {
        for (int i = 0; i < 48; i++) t = md->state[i] ^= PI_TABLE[t];
        t = (t + round) & 0xff;
    }
}

static void md2_update(struct md2 *md, const void *data, size_t bytes, unsigned char mask)
{
    for (size_t i = 0; i < bytes; i++) {
        md->block[md->filled++] = ((const unsigned char *)data)[i] ^ mask;
        if (md->filled < 16) continue;
        md2_block(md, md->block);
        md->filled = 0;
    }
}

static void md2_finish(struct md2 *md, unsigned char digest[16])
{
    unsigned char padding[16], checksum[16];
    unsigned missing = 16 - md->filled;
    memset(padding, (int)missing, missing);
    md2_update(md, padding, missing, 0);
    memcpy(checksum, md->checksum, 16);
    md2_update(md, checksum, 16, 0);
    memcpy(digest, md->state, 16);
}

static const unsigned char KEY[16] = {0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52,
                                      0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f};
/* Versions that end in 0 or 1 mean a runtime that wants a constant. */
static const unsigned long long CONSTANT[2][2] = {{0x3341181c03cb675c, 0x8ed383aa1f4cd1e8},
                                                  {0x1841181c03cb675c, 0x8ed383aa1f4cd1e8}};

struct device_identity {
    CUuuid uuid;
    int domain, bus, slot;
};

void validity_answer(struct validity_question *question, int devices, unsigned long long out[2])
{
    if (question->runtime_version % 10 < 2) {
        memcpy(out, CONSTANT[question->runtime_version % 10], 16);
        return;
    }
    question->process = (unsigned)getpid();
    question->thread = (unsigned)pthread_self();

    struct md2 inner = {0}, outer = {0};
    unsigned char digest[16];
    md2_update(&inner, KEY, sizeof KEY, 0x36);
    md2_update(&inner, question, sizeof *question, 0);
    for (int device = 0; device < devices; device++) {
        struct device_identity identity;
        device_identity(device, &identity.uuid, &identity.domain, &identity.bus, &identity.slot);
        md2_update(&inner, &identity, sizeof identity, 0);
    }
    md2_finish(&inner, digest);
    md2_update(&outer, KEY, sizeof KEY, 0x5c);
    md2_update(&outer, digest, sizeof digest, 0);
    md2_finish(&outer, digest);
    memcpy(out, digest, 16);
}

/* A row of equal units, each free or used: the regions, small blocks and pool chunks are all made of these. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

struct span *span_new(CUdeviceptr base, size_t bytes, size_t unit)
{
    struct span *span = calloc(1, sizeof *span);
    size_t units = bytes / unit;
    unsigned char *used = span ? calloc(units, 1) : NULL;
    if (!used) {
        free(span);
        return NULL;
    }
    *span = (struct span){.base = base, .unit = unit, .units = units, .free_units = units, .used = used};
    return span;
}

void span_delete(struct span *span)
{
    free(span->used);
    free(span);
}

bool span_find(const struct span *span, size_t units, size_t *start, size_t *hole)
{
    if (units > span->free_units) return false;
    size_t best = SIZE_MAX;
    for (size_t at = 0; at < span->units;) {
        if (span->used[at]) {
            const unsigned char *next = memchr(span->used + at, 0, span->units - at);
            if (!next) break;
            at = (size_t)(next - span->used);
        }
        const unsigned char *end = memchr(span->used + at, 1, span->units - at);
        size_t length = (end ? (size_t)(end - span->used) : span->units) - at;
        if (length >= units && length < best) {
            best = length;
            *start = at;
        }
        at += length;
    }
    *hole = best;
    return best != SIZE_MAX;
}

void span_take(struct span *span, size_t start, size_t units)
{
    memset(span->used + start, 1, units);
    span->free_units -= units;
}

void span_give(struct span *span, size_t start, size_t units)
{
    memset(span->used + start, 0, units);
    span->free_units += units;
}

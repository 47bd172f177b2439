/* CUDA arrays and mipmapped arrays: opaque memory, width x height x depth x channels x format. */
#include "fake.h"

#include <stdlib.h>

struct array {
    struct array *next;
    int device;
    CUdeviceptr base;
    size_t bytes, extent;
    bool mipmapped;
    CUDA_ARRAY3D_DESCRIPTOR shape;
};

static struct array *arrays;

/* CUarray_format, cuda.h 13.5: bytes of one channel; 0 for the packed formats, which the fake does not know. */
static size_t channel_bytes(int format)
{
    switch (format) {
    case 0x01: case 0x08: return 1;            /* (UN)SIGNED_INT8 */
    case 0x02: case 0x09: case 0x10: return 2; /* (UN)SIGNED_INT16, HALF */
    case 0x03: case 0x0a: case 0x20: return 4; /* (UN)SIGNED_INT32, FLOAT */
    default: return 0;
    }
}

static bool level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned level, size_t *bytes)
{
    size_t width = shape->width >> level, height = shape->height >> level, depth = shape->depth >> level;
    *bytes = channel_bytes(shape->format) * shape->channels;
    return !__builtin_mul_overflow(*bytes, width ? width : 1, bytes) &&
           !__builtin_mul_overflow(*bytes, height ? height : 1, bytes) &&
           !__builtin_mul_overflow(*bytes, depth ? depth : 1, bytes);
}

static CUresult create(struct array **out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels, bool mipmapped)
{
    if (!out || !shape || !shape->width || !channel_bytes(shape->format)) return CUDA_ERROR_INVALID_VALUE;
    if (shape->channels != 1 && shape->channels != 2 && shape->channels != 4) return CUDA_ERROR_INVALID_VALUE;
    size_t total = 0, bytes;
    for (unsigned level = 0; level < levels; level++)
        if (!level_bytes(shape, level, &bytes) || __builtin_add_overflow(total, bytes, &total))
            return CUDA_ERROR_OUT_OF_MEMORY;
    struct array made = {.next = arrays, .device = context_current()->device, .mipmapped = mipmapped, .shape = *shape};
    made.bytes = total;
    CUresult result = space_alloc(made.device, total, &made.base, &made.extent);
    if (result != CUDA_SUCCESS) return result;
    struct array *array = malloc(sizeof *array);
    if (!array) abort();
    *array = made;
    *out = arrays = array;
    return CUDA_SUCCESS;
}

static CUresult create_2d(struct array **out, const CUDA_ARRAY_DESCRIPTOR *flat)
{
    if (!flat) return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR shape = {flat->width, flat->height, 0, flat->format, flat->channels, 0};
    return create(out, &shape, 1, false);
}

static struct array *find(struct array *array, bool mipmapped)
{
    for (struct array *a = arrays; a; a = a->next)
        if (a == array && a->mipmapped == mipmapped) return a;
    return NULL;
}

static CUresult destroy(struct array *array, bool mipmapped)
{
    if (!find(array, mipmapped)) return CUDA_ERROR_INVALID_HANDLE;
    struct array **at = &arrays;
    while (*at != array) at = &(*at)->next;
    *at = array->next;
    space_free(array->device, array->base, array->extent);
    free(array);
    return CUDA_SUCCESS;
}

static CUresult descriptor(CUDA_ARRAY3D_DESCRIPTOR *out, struct array *array)
{
    if (!out) return CUDA_ERROR_INVALID_VALUE;
    if (!find(array, false)) return CUDA_ERROR_INVALID_HANDLE;
    *out = array->shape;
    return CUDA_SUCCESS;
}

#define BYTES(out) (rc_ == CUDA_SUCCESS ? (*(out))->bytes : 0)

EXPORT CUresult cuArrayCreate_v2(CUarray *out, const CUDA_ARRAY_DESCRIPTOR *shape)
{
    CALL(NEEDS_CONTEXT, create_2d(out, shape), "width=%zu height=%zu bytes=%zu array=0x%llx",
         shape ? shape->width : 0, shape ? shape->height : 0, BYTES(out), OUT(out));
}
EXPORT CUresult cuArray3DCreate_v2(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
    CALL(NEEDS_CONTEXT, create(out, shape, 1, false), "width=%zu height=%zu depth=%zu bytes=%zu array=0x%llx",
         shape ? shape->width : 0, shape ? shape->height : 0, shape ? shape->depth : 0, BYTES(out), OUT(out));
}
EXPORT CUresult cuArrayDestroy(CUarray array) { CALL(NEEDS_CONTEXT, destroy(array, false), "array=%p", (void *)array); }
EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *out, CUarray array)
{
    QUERY(NEEDS_CONTEXT, descriptor(out, array));
}
EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned levels)
{
    CALL(NEEDS_CONTEXT, create(out, shape, levels, true), "width=%zu height=%zu depth=%zu levels=%u bytes=%zu array=0x%llx",
         shape ? shape->width : 0, shape ? shape->height : 0, shape ? shape->depth : 0, levels, BYTES(out), OUT(out));
}
EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    CALL(NEEDS_CONTEXT, destroy(array, true), "array=%p", (void *)array);
}

/* Every entry point of exports.def that no other file defines: weak, so that a definition elsewhere takes its place. */
#include "fake.h"

#define NO_OP CUDA_SUCCESS
#define UNSUPPORTED CUDA_ERROR_NOT_SUPPORTED
#define X(export, base, version, streams, result)                                                           \
    EXPORT __attribute__((weak)) CUresult export(void);                                                     \
    CUresult export(void) { CALL(NEEDS_INIT, result, " "); }
#include "exports.def"

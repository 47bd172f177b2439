//! Kernels that are launched again and again: the runtime asks for their functions each time.
//# Link: cuda
#include "api.h"

int cuLibraryLoadData(void **library, const void *image, int *options, void **values, unsigned count,
                           int *library_options, void **library_values, unsigned library_count);
int cuLibraryGetKernel(void **kernel, void *library, const char *name);
int cuKernelGetFunction(void **function, void *kernel);
int cuLibraryUnload(void *library);

int main(void)
{
    void *context, *library, *other, *kernels[3], *function;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuLibraryLoadData(&library, "image", NULL, NULL, 0, NULL, NULL, 0));
    OK(cuLibraryLoadData(&other, "image", NULL, NULL, 0, NULL, NULL, 0));
    for (int i = 0; i < 3; i++) OK(cuLibraryGetKernel(&kernels[i], library, "kernel"));
    for (int step = 0; step < 1000; step++)
        for (int i = 0; i < 3; i++) OK(cuKernelGetFunction(&function, kernels[i]));
    RETURNS(1, cuKernelGetFunction(NULL, kernels[0]));
    /* Who knows whose functions went with it. */
    OK(cuLibraryUnload(other));
    for (int step = 0; step < 1000; step++)
        for (int i = 0; i < 2; i++) OK(cuKernelGetFunction(&function, kernels[i]));
    OK(cuLibraryUnload(library));
    return 0;
}

//! Memory of graphs: explicit nodes, and cudaMallocAsync's driver call under capture.
//# Link: cuda
//# Expect: cuGraphAddMemAllocNode 4194304 freed
//# Expect: cuGraphAddNode 2097152 freed
//# Expect: cuGraphAddNode_v2 2097152 freed
//# Expect: cuMemAllocAsync 1048576 freed
#include "api.h"

int main(void)
{
    void *context, *graph, *node, *exec, *stream;
    CUdeviceptr p;
    size_t before, after;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemGetInfo_v2(&before, NULL));

    CUmemAllocNodeParams params = {.pool = {.type = 1, .location = {1, 0}}, .bytesize = 4 * MIB};
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cuMemGetInfo_v2(&after, NULL));
    CHECK(before == after); /* memory comes at launch */
    OK(cuGraphLaunch(exec, NULL));
    OK(cuMemGetInfo_v2(&after, NULL));
    CHECK(before - after == 4 * MIB);
    OK(cuGraphAddMemFreeNode(&node, graph, NULL, 0, params.dptr));
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
    OK(cuMemGetInfo_v2(&after, NULL));
    CHECK(before == after);

    CUgraphNodeParams alloc = {.type = 10, .alloc = {.pool = {.type = 1, .location = {1, 0}}, .bytesize = 2 * MIB}};
    CUgraphNodeParams other = {.type = 0}, freed = {.type = 11};
    OK(cuGraphCreate(&graph, 0));
    OK(cuGraphAddNode(&node, graph, NULL, 0, &other));
    OK(cuGraphAddNode(&node, graph, NULL, 0, &alloc));
    freed.freed = alloc.alloc.dptr;
    OK(cuGraphAddNode(&node, graph, NULL, 0, &freed));
    OK(cuGraphAddNode_v2(&node, graph, NULL, NULL, 0, &alloc));
    freed.freed = alloc.alloc.dptr;
    OK(cuGraphAddNode_v3(&node, graph, NULL, NULL, 0, &freed));
    OK(cuGraphDestroy(graph));

    OK(cuStreamCreate(&stream, 0));
    OK(cuStreamBeginCapture_v2(stream, 0));
    OK(cuMemAllocAsync(&p, MIB, stream));
    OK(cuMemFreeAsync(p, stream));
    RETURNS(900, cuStreamSynchronize(stream));
    OK(cuStreamEndCapture(stream, &graph));
    OK(cuGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cuGraphLaunch(exec, stream));
    OK(cuStreamSynchronize(stream));
    OK(cuGraphExecDestroy(exec));
    OK(cuGraphDestroy(graph));
    OK(cuStreamDestroy_v2(stream));
    OK(cuMemGetInfo_v2(&after, NULL));
    CHECK(before == after);
    return 0;
}

//! `libcuda.so.1`: prototypes from cuda.h 13.0, older ones from the release that had them last.
//!
//! `CUresult` is `i32`, `CUdeviceptr` and `CUmemGenericAllocationHandle` are `u64`, other handles are pointers.
//! The 32-bit leftovers of CUDA 2 (`cuMemAlloc`, `cuMemFree`, ... without suffix) are never rows; of that age only
//! contexts are, whose prototypes did not change.
//!
//! About memory, and no rows, because no memory comes or goes with them (`tests/names.py` reads this list):
//! - `cuMemPoolSetAccess`, `cuMemPoolExportPointer`, `cuMulticastBind*`, `cuMulticastUnbind`, `cuMulticastAddDevice`,
//!   `cuMemMapArrayAsync`, `cuMemHostGetDevicePointer`: other views of memory that a row has seen;
//! - `cuGreenCtxCreate`, `cuGreenCtxDestroy`: share the memory of their device's primary context;
//! - `cuImportExternalMemory`: has an address, and a size, only when `cuExternalMemoryGetMappedBuffer` gives it one;
//! - `cuImportExternalSemaphore`: no memory;
//! - `cuMemAdvise`, `cuMemPrefetch*`, `cuMemDiscard*`: where managed memory lies just now, and whether what is in it matters;
//! - `cuLibraryGetKernel`, `cuLinkComplete`: code that is not on a device yet.

use super::structs::{
    IpcMemHandle, access_flags, array_bytes, array3d_bytes, bare_location, external_bytes, fabric_hash,
    graph_alloc, image_bytes, ipc_hash, location, mipmap_bytes, multicast_bytes, pool_attribute, read,
    read_handle,
};
use super::{contexts, events, loader};
use crate::hook::hooks;
use core::ffi::{c_char, c_void};
use gputrace_ring::record::Action;

type Out = *mut *mut c_void;
type Handle = *mut c_void;

hooks! {
    /// `CUresult cuInit(unsigned int Flags)`
    fn cuInit(flags: u32) as "" = custom { flags: flags } via loader::initialised;

    // Linear memory of a device.

    /// `CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)`
    fn cuMemAlloc_v2(dptr: *mut u64, bytesize: usize) as "cudaMalloc"
        = acquire Alloc { bytes: bytesize } out { addr: read(dptr) };
    /// `CUresult cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height, unsigned int ElementSizeBytes)`
    fn cuMemAllocPitch_v2(dptr: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) as "cudaMallocPitch"
        = acquire Alloc { bytes: width, times: height } out { addr: read(dptr), bytes: height, times: read(pitch) };
    /// `CUresult cuMemFree_v2(CUdeviceptr dptr)`
    fn cuMemFree_v2(dptr: u64) as "cudaFree" = release Free { addr: dptr };
    /// `CUresult cuMemGetInfo_v2(size_t *free, size_t *total)`
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) as "cudaMemGetInfo"
        = observe MemInfo {} out { bytes: read(free), extra: read(total) };

    // Checkpoints of a process, by itself or by another: its memory on the GPU goes to the host, and comes back.

    /// `CUresult cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)`
    fn cuCheckpointProcessLock(pid: i32, args: *mut c_void) as "" = observe Checkpoint { handle: pid, extra: 1 };
    /// `CUresult cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)`
    fn cuCheckpointProcessCheckpoint(pid: i32, args: *mut c_void) as "" = observe Checkpoint { handle: pid, extra: 2 };
    /// `CUresult cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)`
    fn cuCheckpointProcessRestore(pid: i32, args: *mut c_void) as "" = observe Checkpoint { handle: pid, extra: 3 };
    /// `CUresult cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)`
    fn cuCheckpointProcessUnlock(pid: i32, args: *mut c_void) as "" = observe Checkpoint { handle: pid, extra: 4 };

    // Managed and pinned memory.

    /// `CUresult cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)`
    fn cuMemAllocManaged(dptr: *mut u64, bytesize: usize, flags: u32) as "cudaMallocManaged"
        = acquire AllocManaged { bytes: bytesize, extra: flags } out { addr: read(dptr) };
    /// `CUresult cuMemHostAlloc(void **pp, size_t bytesize, unsigned int Flags)`
    fn cuMemHostAlloc(pp: Out, bytesize: usize, flags: u32) as "cudaHostAlloc"
        = acquire AllocHost { host: (), bytes: bytesize, extra: flags } out { addr: read_handle(pp) };
    /// `CUresult cuMemAllocHost_v2(void **pp, size_t bytesize)`
    fn cuMemAllocHost_v2(pp: Out, bytesize: usize) as "cudaMallocHost"
        = acquire AllocHost { host: (), bytes: bytesize } out { addr: read_handle(pp) };
    /// `CUresult cuMemFreeHost(void *p)`
    fn cuMemFreeHost(p: Handle) as "cudaFreeHost" = release FreeHost { host: (), addr: p };
    /// `CUresult cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)`
    fn cuMemHostRegister_v2(p: Handle, bytesize: usize, flags: u32) as "cudaHostRegister"
        = acquire HostRegister { host: (), addr: p, bytes: bytesize, extra: flags };
    /// `CUresult cuMemHostRegister(void *p, size_t bytesize, unsigned int Flags)` of CUDA 4.0
    fn cuMemHostRegister(p: Handle, bytesize: usize, flags: u32) as "cudaHostRegister"
        = acquire HostRegister { host: (), addr: p, bytes: bytesize, extra: flags };
    /// `CUresult cuMemHostUnregister(void *p)`
    fn cuMemHostUnregister(p: Handle) as "cudaHostUnregister" = release HostUnregister { host: (), addr: p };

    // Stream-ordered memory and its pools.

    /// `CUresult cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)`
    fn cuMemAllocAsync(dptr: *mut u64, bytesize: usize, stream: Handle) as "cudaMallocAsync"
        = acquire AllocAsync { bytes: bytesize, stream: stream } out { addr: read(dptr) };
    /// As `cuMemAllocAsync`; null is the thread's own stream.
    fn cuMemAllocAsync_ptsz(dptr: *mut u64, bytesize: usize, stream: Handle) as "cudaMallocAsync"
        = acquire AllocAsync { bytes: bytesize, thread_stream: stream } out { addr: read(dptr) };
    /// `CUresult cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)`
    fn cuMemAllocFromPoolAsync(dptr: *mut u64, bytesize: usize, pool: Handle, stream: Handle) as "cudaMallocFromPoolAsync"
        = acquire AllocAsync { bytes: bytesize, handle: pool, stream: stream } out { addr: read(dptr) };
    /// As `cuMemAllocFromPoolAsync`; null is the thread's own stream.
    fn cuMemAllocFromPoolAsync_ptsz(dptr: *mut u64, bytesize: usize, pool: Handle, stream: Handle) as "cudaMallocFromPoolAsync"
        = acquire AllocAsync { bytes: bytesize, handle: pool, thread_stream: stream } out { addr: read(dptr) };
    /// `CUresult cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)`
    fn cuMemFreeAsync(dptr: u64, stream: Handle) as "cudaFreeAsync" = release FreeAsync { addr: dptr, stream: stream };
    /// As `cuMemFreeAsync`; null is the thread's own stream.
    fn cuMemFreeAsync_ptsz(dptr: u64, stream: Handle) as "cudaFreeAsync"
        = release FreeAsync { addr: dptr, thread_stream: stream };
    /// `CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)`
    fn cuMemPoolCreate(pool: Out, props: *const c_void) as "cudaMemPoolCreate"
        = acquire PoolCreate { location: location(props) } out { handle: read_handle(pool) };
    /// `CUresult cuMemPoolDestroy(CUmemoryPool pool)`
    fn cuMemPoolDestroy(pool: Handle) as "cudaMemPoolDestroy" = release PoolDestroy { handle: pool };
    /// `CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t minBytesToKeep)`
    fn cuMemPoolTrimTo(pool: Handle, keep: usize) as "cudaMemPoolTrimTo" = release PoolTrim { handle: pool, bytes: keep };
    /// `CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)`
    fn cuMemPoolSetAttribute(pool: Handle, attribute: i32, value: *mut c_void) as "cudaMemPoolSetAttribute"
        = observe PoolSet { handle: pool, extra: attribute } out { bytes: pool_attribute(attribute, value) };
    /// `CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attr, void *value)`
    fn cuMemPoolGetAttribute(pool: Handle, attribute: i32, value: *mut c_void) as "cudaMemPoolGetAttribute"
        = observe PoolGet { handle: pool, extra: attribute } out { bytes: pool_attribute(attribute, value) };
    /// `CUresult cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)`
    fn cuDeviceSetMemPool(device: i32, pool: Handle) as "cudaDeviceSetMemPool"
        = observe PoolSelect { device: device, handle: pool };
    /// `CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)`
    fn cuDeviceGetMemPool(pool: Out, device: i32) as "cudaDeviceGetMemPool"
        = observe PoolOf { device: device } out { handle: read_handle(pool) };
    /// `CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)`
    fn cuDeviceGetDefaultMemPool(pool: Out, device: i32) as "cudaDeviceGetDefaultMemPool"
        = observe PoolOf { device: device, extra: 1 } out { handle: read_handle(pool) };
    /// `CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)` of CUDA 13.0
    fn cuMemSetMemPool(place: *mut c_void, kind: i32, pool: Handle) as "cudaMemSetMemPool"
        = observe PoolSelect { location: bare_location(place), handle: pool };
    /// `CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)` of CUDA 13.0
    fn cuMemGetMemPool(pool: Out, place: *mut c_void, kind: i32) as "cudaMemGetMemPool"
        = observe PoolOf { location: bare_location(place) } out { handle: read_handle(pool) };
    /// `CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool_out, CUmemLocation *location, CUmemAllocationType type)` of CUDA 13.0
    fn cuMemGetDefaultMemPool(pool: Out, place: *mut c_void, kind: i32) as "cudaMemGetDefaultMemPool"
        = observe PoolOf { location: bare_location(place), extra: 1 } out { handle: read_handle(pool) };
    /// `CUresult cuMemPoolExportToShareableHandle(void *handle_out, CUmemoryPool pool, CUmemAllocationHandleType handleType, unsigned long long flags)`
    fn cuMemPoolExportToShareableHandle(out: *mut c_void, pool: Handle, kind: i32, flags: u64) as "cudaMemPoolExportToShareableHandle"
        = observe PoolShare { handle: pool, extra: kind };
    /// `CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool_out, void *handle, CUmemAllocationHandleType handleType, unsigned long long flags)`
    fn cuMemPoolImportFromShareableHandle(pool: Out, handle: Handle, kind: i32, flags: u64) as "cudaMemPoolImportFromShareableHandle"
        = acquire PoolShare { extra: kind } out { handle: read_handle(pool) };
    /// `CUresult cuMemPoolImportPointer(CUdeviceptr *ptr_out, CUmemoryPool pool, CUmemPoolPtrExportData *shareData)`
    fn cuMemPoolImportPointer(ptr: *mut u64, pool: Handle, data: *mut c_void) as "cudaMemPoolImportPointer"
        = acquire ImportPointer { handle: pool } out { addr: read(ptr) };

    // Virtual memory management: reservations, physical memory, and maps between them.

    /// `CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags)`
    fn cuMemAddressReserve(ptr: *mut u64, size: usize, alignment: usize, addr: u64, flags: u64) as ""
        = acquire Reserve { bytes: size, extra: alignment } out { addr: read(ptr) };
    /// `CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size)`
    fn cuMemAddressFree(ptr: u64, size: usize) as "" = release Unreserve { addr: ptr, bytes: size };
    /// `CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags)`
    fn cuMemCreate(handle: *mut u64, size: usize, prop: *const c_void, flags: u64) as ""
        = acquire Create { bytes: size, location: location(prop) } out { handle: read(handle) };
    /// `CUresult cuMemRelease(CUmemGenericAllocationHandle handle)`
    fn cuMemRelease(handle: u64) as "" = release Release { handle: handle };
    /// `CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)`
    fn cuMemRetainAllocationHandle(handle: *mut u64, addr: Handle) as ""
        = acquire Retain { addr: addr } out { handle: read(handle) };
    /// `CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)`
    fn cuMemMap(ptr: u64, size: usize, offset: usize, handle: u64, flags: u64) as ""
        = acquire Map { addr: ptr, bytes: size, extra: offset, handle: handle };
    /// `CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)`
    fn cuMemUnmap(ptr: u64, size: usize) as "" = release Unmap { addr: ptr, bytes: size };
    /// `CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)`
    fn cuMemSetAccess(ptr: u64, size: usize, description: *const c_void, count: usize) as ""
        = acquire SetAccess { addr: ptr, bytes: size, handle: count, extra: access_flags(description, count) };
    /// `CUresult cuMemExportToShareableHandle(void *shareableHandle, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType handleType, unsigned long long flags)`
    fn cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: i32, flags: u64) as ""
        = acquire Export { handle: handle, extra: kind } out { addr: fabric_hash(out, kind) };
    /// `CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *osHandle, CUmemAllocationHandleType shHandleType)`
    fn cuMemImportFromShareableHandle(handle: *mut u64, os_handle: Handle, kind: i32) as ""
        = acquire Import { extra: kind } out { handle: read(handle), addr: fabric_hash(os_handle, kind) };
    /// `CUresult cuMulticastCreate(CUmemGenericAllocationHandle *mcHandle, const CUmulticastObjectProp *prop)`
    fn cuMulticastCreate(handle: *mut u64, props: *const c_void) as ""
        = acquire MulticastCreate { bytes: multicast_bytes(props) } out { handle: read(handle) };

    // Memory of other processes.

    /// `CUresult cuIpcGetMemHandle(CUipcMemHandle *pHandle, CUdeviceptr dptr)`
    fn cuIpcGetMemHandle(handle: *mut IpcMemHandle, dptr: u64) as "cudaIpcGetMemHandle"
        = acquire IpcGet { addr: dptr } out { handle: ipc_hash(handle) };
    /// `CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)`
    fn cuIpcOpenMemHandle_v2(dptr: *mut u64, handle: IpcMemHandle, flags: u32) as "cudaIpcOpenMemHandle"
        = acquire IpcOpen { handle: handle.hash() } out { addr: read(dptr) };
    /// `CUresult cuIpcOpenMemHandle(CUdeviceptr *pdptr, CUipcMemHandle handle, unsigned int Flags)` of CUDA 4.1
    fn cuIpcOpenMemHandle(dptr: *mut u64, handle: IpcMemHandle, flags: u32) as "cudaIpcOpenMemHandle"
        = acquire IpcOpen { handle: handle.hash() } out { addr: read(dptr) };
    /// `CUresult cuIpcCloseMemHandle(CUdeviceptr dptr)`
    fn cuIpcCloseMemHandle(dptr: u64) as "cudaIpcCloseMemHandle" = release IpcClose { addr: dptr };

    // Arrays.

    /// `CUresult cuArrayCreate_v2(CUarray *pHandle, const CUDA_ARRAY_DESCRIPTOR *pAllocateArray)`
    fn cuArrayCreate_v2(handle: Out, descriptor: *const c_void) as "cudaMallocArray"
        = acquire ArrayCreate { bytes: array_bytes(descriptor) } out { handle: read_handle(handle) };
    /// `CUresult cuArray3DCreate_v2(CUarray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pAllocateArray)`
    fn cuArray3DCreate_v2(handle: Out, descriptor: *const c_void) as "cudaMalloc3DArray"
        = acquire ArrayCreate { bytes: array3d_bytes(descriptor) } out { handle: read_handle(handle) };
    /// `CUresult cuArrayDestroy(CUarray hArray)`
    fn cuArrayDestroy(handle: Handle) as "cudaFreeArray" = release ArrayDestroy { handle: handle };
    /// `CUresult cuMipmappedArrayCreate(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc, unsigned int numMipmapLevels)`
    fn cuMipmappedArrayCreate(handle: Out, descriptor: *const c_void, levels: u32) as "cudaMallocMipmappedArray"
        = acquire ArrayCreate { bytes: mipmap_bytes(descriptor, levels) } out { handle: read_handle(handle) };
    /// `CUresult cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)`
    fn cuMipmappedArrayDestroy(handle: Handle) as "cudaFreeMipmappedArray" = release ArrayDestroy { handle: handle };

    // Memory that graphs own.

    /// `CUresult cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)`
    fn cuGraphAddMemAllocNode(node: Out, graph: Handle, dependencies: *const c_void, n: usize, params: *mut c_void) as "cudaGraphAddMemAllocNode"
        = acquire GraphAlloc { handle: graph, bytes: graph_alloc(params).bytes, location: graph_alloc(params).location }
          out { addr: graph_alloc(params).addr };
    /// `CUresult cuGraphAddMemFreeNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUdeviceptr dptr)`
    fn cuGraphAddMemFreeNode(node: Out, graph: Handle, dependencies: *const c_void, n: usize, dptr: u64) as "cudaGraphAddMemFreeNode"
        = acquire GraphFree { handle: graph, addr: dptr };

    /// `CUresult cuGraphAddNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUgraphNodeParams *nodeParams)` of CUDA 12.2
    fn cuGraphAddNode(node: Out, graph: Handle, dependencies: *const c_void, n: usize, node_params: *mut c_void) as "cudaGraphAddNode"
        = custom { row: Row::cuGraphAddNode as u16, graph: graph, params: node_params } via events::graph_node;
    /// `CUresult cuGraphAddNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData, size_t numDependencies, CUgraphNodeParams *nodeParams)`
    fn cuGraphAddNode_v2(node: Out, graph: Handle, dependencies: *const c_void, edges: *const c_void, n: usize, node_params: *mut c_void) as "cudaGraphAddNode"
        = custom { row: Row::cuGraphAddNode_v2 as u16, graph: graph, params: node_params } via events::graph_node;
    /// As `cuGraphAddNode_v2`; newer kinds of nodes, CUDA 13.4
    fn cuGraphAddNode_v3(node: Out, graph: Handle, dependencies: *const c_void, edges: *const c_void, n: usize, node_params: *mut c_void) as "cudaGraphAddNode"
        = custom { row: Row::cuGraphAddNode_v3 as u16, graph: graph, params: node_params } via events::graph_node;

    /// `CUresult cuGraphInstantiate(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize)` of CUDA 10.0
    fn cuGraphInstantiate(exec: Out, graph: Handle, error: Out, log: *mut c_char, bytes: usize) as "cudaGraphInstantiate"
        = observe GraphInstantiate { extra: graph } out { handle: read_handle(exec) };
    /// `CUresult cuGraphInstantiate_v2(CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize)` of CUDA 11.0
    fn cuGraphInstantiate_v2(exec: Out, graph: Handle, error: Out, log: *mut c_char, bytes: usize) as "cudaGraphInstantiate"
        = observe GraphInstantiate { extra: graph } out { handle: read_handle(exec) };
    /// `CUresult cuGraphInstantiateWithFlags(CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags)`
    fn cuGraphInstantiateWithFlags(exec: Out, graph: Handle, flags: u64) as "cudaGraphInstantiateWithFlags"
        = observe GraphInstantiate { extra: graph } out { handle: read_handle(exec) };
    /// `CUresult cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)`
    fn cuGraphInstantiateWithParams(exec: Out, graph: Handle, params: *mut c_void) as "cudaGraphInstantiateWithParams"
        = observe GraphInstantiate { extra: graph } out { handle: read_handle(exec) };
    /// As `cuGraphInstantiateWithParams`; a null stream in the parameters is the thread's own.
    fn cuGraphInstantiateWithParams_ptsz(exec: Out, graph: Handle, params: *mut c_void) as "cudaGraphInstantiateWithParams"
        = observe GraphInstantiate { extra: graph } out { handle: read_handle(exec) };
    /// `CUresult cuGraphLaunch(CUgraphExec hGraphExec, CUstream hStream)`
    fn cuGraphLaunch(exec: Handle, stream: Handle) as "cudaGraphLaunch"
        = custom { api: Row::cuGraphLaunch as u16, exec: exec, stream: stream } via events::graph_launch;
    /// As `cuGraphLaunch`; null is the thread's own stream.
    fn cuGraphLaunch_ptsz(exec: Handle, stream: Handle) as "cudaGraphLaunch"
        = custom { api: Row::cuGraphLaunch_ptsz as u16, exec: exec, stream: stream } via events::graph_launch;
    /// `CUresult cuGraphExecDestroy(CUgraphExec hGraphExec)`
    fn cuGraphExecDestroy(exec: Handle) as "cudaGraphExecDestroy" = release GraphExecDestroy { handle: exec };
    /// `CUresult cuGraphDestroy(CUgraph hGraph)`
    fn cuGraphDestroy(graph: Handle) as "cudaGraphDestroy" = release GraphDestroy { handle: graph };
    /// `CUresult cuDeviceGraphMemTrim(CUdevice device)`
    fn cuDeviceGraphMemTrim(device: i32) as "cudaDeviceGraphMemTrim" = observe GraphMemTrim { device: device };
    /// `CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void* value)`
    fn cuDeviceGetGraphMemAttribute(device: i32, attribute: i32, value: *mut c_void) as "cudaDeviceGetGraphMemAttribute"
        = observe GraphMemGet { device: device, extra: attribute } out { bytes: read(value.cast::<u64>()) };

    // Memory of graphics and of others.

    /// `CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *devPtr, CUexternalMemory extMem, const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *bufferDesc)`
    fn cuExternalMemoryGetMappedBuffer(ptr: *mut u64, memory: Handle, description: *const c_void) as "cudaExternalMemoryGetMappedBuffer"
        = acquire ImportPointer { handle: memory, bytes: external_bytes(description) } out { addr: read(ptr) };

    // Contexts.

    /// `CUresult cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)` of CUDA 2.0
    fn cuCtxCreate(context: Out, flags: u32, device: i32) as ""
        = acquire ContextCreate { device: device, extra: flags } out { handle: read_handle(context) };
    /// `CUresult cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)` of CUDA 3.2
    fn cuCtxCreate_v2(context: Out, flags: u32, device: i32) as ""
        = acquire ContextCreate { device: device, extra: flags } out { handle: read_handle(context) };
    /// `CUresult cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *paramsArray, int numParams, unsigned int flags, CUdevice dev)` of CUDA 11.4
    fn cuCtxCreate_v3(context: Out, params: *mut c_void, n: i32, flags: u32, device: i32) as ""
        = acquire ContextCreate { device: device, extra: flags } out { handle: read_handle(context) };
    /// `CUresult cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *ctxCreateParams, unsigned int flags, CUdevice dev)`
    fn cuCtxCreate_v4(context: Out, params: *mut c_void, flags: u32, device: i32) as ""
        = acquire ContextCreate { device: device, extra: flags } out { handle: read_handle(context) };
    /// `CUresult cuCtxDestroy(CUcontext ctx)` of CUDA 2.0
    fn cuCtxDestroy(context: Handle) as ""
        = custom { row: Row::cuCtxDestroy as u16, context: context } via contexts::destroyed;
    /// `CUresult cuCtxDestroy_v2(CUcontext ctx)`
    fn cuCtxDestroy_v2(context: Handle) as ""
        = custom { row: Row::cuCtxDestroy_v2 as u16, context: context } via contexts::destroyed;
    /// `CUresult cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)`
    fn cuDevicePrimaryCtxRetain(context: Out, device: i32) as ""
        = acquire PrimaryRetain { device: device, extra: device } out { handle: read_handle(context) };
    /// `CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev)`
    fn cuDevicePrimaryCtxRelease_v2(device: i32) as ""
        = custom { row: Row::cuDevicePrimaryCtxRelease_v2 as u16, device: device } via contexts::released;
    /// `CUresult cuDevicePrimaryCtxRelease(CUdevice dev)` of CUDA 7.0
    fn cuDevicePrimaryCtxRelease(device: i32) as ""
        = custom { row: Row::cuDevicePrimaryCtxRelease as u16, device: device } via contexts::released;
    /// `CUresult cuDevicePrimaryCtxReset_v2(CUdevice dev)`
    fn cuDevicePrimaryCtxReset_v2(device: i32) as "cudaDeviceReset"
        = custom { row: Row::cuDevicePrimaryCtxReset_v2 as u16, device: device } via contexts::reset;
    /// `CUresult cuDevicePrimaryCtxReset(CUdevice dev)` of CUDA 7.0
    fn cuDevicePrimaryCtxReset(device: i32) as "cudaDeviceReset"
        = custom { row: Row::cuDevicePrimaryCtxReset as u16, device: device } via contexts::reset;

    /// `CUresult cuCtxSetLimit(CUlimit limit, size_t value)`
    fn cuCtxSetLimit(limit: i32, value: usize) as "cudaDeviceSetLimit" = observe LimitSet { extra: limit, bytes: value };
    /// `CUresult cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)`
    fn cuCtxEnablePeerAccess(peer: Handle, flags: u32) as "cudaDeviceEnablePeerAccess" = observe PeerEnable { handle: peer };

    // Code: the driver takes memory for it that no call says the size of.

    /// `CUresult cuModuleLoad(CUmodule *module, const char *fname)`
    fn cuModuleLoad(module: Out, path: *const c_char) as "" = observe CodeLoad {} out { handle: read_handle(module) };
    /// `CUresult cuModuleLoadData(CUmodule *module, const void *image)`
    fn cuModuleLoadData(module: Out, image: *const c_void) as ""
        = observe CodeLoad {} out { handle: read_handle(module), bytes: image_bytes(image) };
    /// `CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void **optionValues)`
    fn cuModuleLoadDataEx(module: Out, image: *const c_void, n: u32, options: *mut i32, values: Out) as ""
        = observe CodeLoad {} out { handle: read_handle(module), bytes: image_bytes(image) };
    /// `CUresult cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)`
    fn cuModuleLoadFatBinary(module: Out, image: *const c_void) as ""
        = observe CodeLoad {} out { handle: read_handle(module), bytes: image_bytes(image) };
    /// `CUresult cuModuleUnload(CUmodule hmod)`
    fn cuModuleUnload(module: Handle) as "" = release CodeUnload { handle: module };
    /// `CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions, void** libraryOptionValues, unsigned int numLibraryOptions)`
    fn cuLibraryLoadData(library: Out, image: *const c_void, options: *mut i32, values: Out, n: u32, library_options: *mut i32, library_values: Out, m: u32) as "cudaLibraryLoadData"
        = observe CodeLoad {} out { handle: read_handle(library), bytes: image_bytes(image) };
    /// `CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions)`
    fn cuLibraryLoadFromFile(library: Out, path: *const c_char, options: *mut i32, values: Out, n: u32, library_options: *mut i32, library_values: Out, m: u32) as "cudaLibraryLoadFromFile"
        = observe CodeLoad {} out { handle: read_handle(library) };
    /// `CUresult cuLibraryUnload(CUlibrary library)`
    fn cuLibraryUnload(library: Handle) as "cudaLibraryUnload" = release CodeUnload { handle: library };
    /// `CUresult cuLibraryGetModule(CUmodule *pMod, CUlibrary library)`
    fn cuLibraryGetModule(module: Out, library: Handle) as "" = observe FunctionLoad { extra: library } out { handle: read_handle(module) };
    /// `CUresult cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)`
    fn cuModuleGetFunction(function: Out, module: Handle, name: *const c_char) as ""
        = observe FunctionLoad { extra: module } out { handle: read_handle(function) };
    /// `CUresult cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)`
    fn cuKernelGetFunction(function: Out, kernel: Handle) as ""
        = observe FunctionLoad { extra: kernel } out { handle: read_handle(function) };
    /// `CUresult cuFuncLoad(CUfunction function)`
    fn cuFuncLoad(function: Handle) as "" = observe FunctionLoad { handle: function };

    // Stream capture: what is asked for meanwhile belongs to a graph.

    /// `CUresult cuStreamBeginCapture_v2(CUstream hStream, CUstreamCaptureMode mode)`
    fn cuStreamBeginCapture_v2(stream: Handle, mode: i32) as "cudaStreamBeginCapture"
        = custom { row: Row::cuStreamBeginCapture_v2 as u16, stream: stream, mode: mode } via events::begin_capture;
    /// As `cuStreamBeginCapture_v2`; null is the thread's own stream.
    fn cuStreamBeginCapture_v2_ptsz(stream: Handle, mode: i32) as "cudaStreamBeginCapture"
        = custom { row: Row::cuStreamBeginCapture_v2_ptsz as u16, stream: stream, mode: mode } via events::begin_capture;
    /// `CUresult cuStreamEndCapture(CUstream hStream, CUgraph *phGraph)`
    fn cuStreamEndCapture(stream: Handle, graph: Out) as "cudaStreamEndCapture"
        = custom { row: Row::cuStreamEndCapture as u16, stream: stream, graph: graph } via events::end_capture;
    /// As `cuStreamEndCapture`; null is the thread's own stream.
    fn cuStreamEndCapture_ptsz(stream: Handle, graph: Out) as "cudaStreamEndCapture"
        = custom { row: Row::cuStreamEndCapture_ptsz as u16, stream: stream, graph: graph } via events::end_capture;

    // Stream events: PyTorch's allocator waits for them before it takes a block back.

    /// `CUresult cuEventRecord(CUevent hEvent, CUstream hStream)`
    fn cuEventRecord(event: Handle, stream: Handle) as "cudaEventRecord"
        = custom { event: event, stream: stream } via events::recorded;
    /// As `cuEventRecord`; null is the thread's own stream.
    fn cuEventRecord_ptsz(event: Handle, stream: Handle) as "cudaEventRecord"
        = custom { event: event, stream: stream } via events::recorded;
    /// `CUresult cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int flags)`
    fn cuEventRecordWithFlags(event: Handle, stream: Handle, flags: u32) as "cudaEventRecordWithFlags"
        = custom { event: event, stream: stream } via events::recorded;
    /// As `cuEventRecordWithFlags`; null is the thread's own stream.
    fn cuEventRecordWithFlags_ptsz(event: Handle, stream: Handle, flags: u32) as "cudaEventRecordWithFlags"
        = custom { event: event, stream: stream } via events::recorded;
    /// `CUresult cuEventQuery(CUevent hEvent)`
    fn cuEventQuery(event: Handle) as "cudaEventQuery" = custom { event: event } via events::queried;
    /// `CUresult cuEventSynchronize(CUevent hEvent)`
    fn cuEventSynchronize(event: Handle) as "cudaEventSynchronize" = custom { event: event } via events::synchronised;

    // The way to all the others.

    /// `CUresult cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)` of CUDA 11.3
    fn cuGetProcAddress(symbol: *const c_char, pfn: Out, version: i32, flags: u64) as ""
        = custom { symbol: symbol, pfn: pfn, version: version } via loader::substitute;
    /// `CUresult cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags, CUdriverProcAddressQueryResult *symbolStatus)`
    fn cuGetProcAddress_v2(symbol: *const c_char, pfn: Out, version: i32, flags: u64, status: *mut i32) as ""
        = custom { symbol: symbol, pfn: pfn, version: version } via loader::substitute;
}

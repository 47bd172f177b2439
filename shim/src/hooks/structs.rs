//! The driver's structures that rows read: only the fields used, at the offsets of cuda.h 11.8 to 13.0.

use core::ffi::c_void;

/// `CUipcMemHandle`: 64 opaque bytes, passed by value.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcMemHandle {
    words: [u64; 8],
}

impl IpcMemHandle {
    /// Joins the two ends of a handle offline; FNV-1a over its words.
    pub(crate) fn hash(&self) -> u64 {
        self.words
            .iter()
            .fold(0xcbf2_9ce4_8422_2325, |hash: u64, word| (hash ^ word).wrapping_mul(0x0100_0000_01b3))
    }
}

/// What a function wrote behind a pointer; 0 where the program gave none.
///
/// # Safety
/// The pointer is null, or good for reading.
pub(crate) unsafe fn read<T: Copy + Default>(pointer: *const T) -> T {
    if pointer.is_null() {
        return T::default();
    }
    // SAFETY: the caller's promise. The program chose the alignment.
    unsafe { pointer.read_unaligned() }
}

/// As [`read`], for handles.
///
/// # Safety
/// The pointer is null, or good for reading.
pub(crate) unsafe fn read_handle(pointer: *const *mut c_void) -> u64 {
    // SAFETY: the caller's promise; a pointer and a word are equally large.
    unsafe { read(pointer.cast::<u64>()) }
}

/// # Safety
/// The pointer is null, or good for reading `at + size_of::<T>()` bytes.
unsafe fn field<T: Copy + Default>(pointer: *const c_void, at: usize) -> T {
    if pointer.is_null() {
        return T::default();
    }
    // SAFETY: the caller's promise.
    let field = unsafe { pointer.cast::<u8>().add(at) };
    // SAFETY: as above.
    unsafe { read(field.cast::<T>()) }
}

/// `location` of a `CUmemAllocationProp` or a `CUmemPoolProps`: type at byte 8, id at byte 12.
///
/// # Safety
/// The pointer is null, or to such a structure.
pub(crate) unsafe fn location(props: *const c_void) -> (i32, i32) {
    // SAFETY: the caller's promise.
    let kind = unsafe { field(props, 8) };
    // SAFETY: as above.
    (kind, unsafe { field(props, 12) })
}

/// A `CUmemLocation` of its own: type at byte 0, id at byte 4.
///
/// # Safety
/// The pointer is null, or to such a structure.
pub(crate) unsafe fn bare_location(location: *const c_void) -> (i32, i32) {
    // SAFETY: the caller's promise.
    let kind = unsafe { field(location, 0) };
    // SAFETY: as above.
    (kind, unsafe { field(location, 4) })
}

/// `magic` of a `__fatBinC_Wrapper_t`, fatbinary_section.h; a pointer to the container follows at byte 8.
const FATBIN_WRAPPER: u32 = 0x466243b1;
/// `FATBIN_MAGIC`, fatbinary.h: header size (16 bits) at byte 6, bytes behind the header (64 bits) at byte 8.
const FATBIN: u32 = 0xba55ed50;
/// The first four bytes of an ELF file.
const ELF: u32 = u32::from_le_bytes(*b"\x7fELF");

/// Bytes of a code image that the driver has just read: a fat binary or a cubin. 0 for PTX, whose end is not looked for.
///
/// # Safety
/// The pointer is null, or to an image that the driver accepted.
pub(crate) unsafe fn image_bytes(image: *const c_void) -> u64 {
    // SAFETY: the caller's promise: every image is longer than its magic, and has what that says.
    match unsafe { field::<u32>(image, 0) } {
        FATBIN_WRAPPER => {
            // SAFETY: as above.
            let container = unsafe { field::<usize>(image, 8) } as *const c_void;
            // SAFETY: as above.
            if unsafe { field::<u32>(container, 0) } != FATBIN {
                return 0;
            }
            // SAFETY: as above.
            unsafe { image_bytes(container) }
        }
        FATBIN => {
            // SAFETY: as above.
            let header = u64::from(unsafe { field::<u16>(image, 6) });
            // SAFETY: as above.
            header.saturating_add(unsafe { field::<u64>(image, 8) })
        }
        ELF => {
            // The section headers come last (elf.h: e_shoff, e_shentsize, e_shnum).
            // SAFETY: as above.
            let sections = unsafe { field::<u64>(image, 0x28) };
            // SAFETY: as above.
            let [size, n] = [0x3a, 0x3c].map(|at| u64::from(unsafe { field::<u16>(image, at) }));
            sections.saturating_add(size * n)
        }
        _ => 0,
    }
}

/// Estimated bytes of a `CUDA_ARRAY_DESCRIPTOR` (width, height, format, channels).
///
/// # Safety
/// The pointer is null, or to such a structure.
pub(crate) unsafe fn array_bytes(descriptor: *const c_void) -> u64 {
    // SAFETY: the caller's promise.
    let [width, height] = [0, 8].map(|at| unsafe { field::<u64>(descriptor, at) });
    // SAFETY: as above.
    let [format, channels] = [16, 20].map(|at| unsafe { field::<u32>(descriptor, at) });
    elements(&[width, height]).saturating_mul(element_bytes(format, channels))
}

/// Estimated bytes of a `CUDA_ARRAY3D_DESCRIPTOR` (width, height, depth, format, channels, flags).
///
/// # Safety
/// The pointer is null, or to such a structure.
pub(crate) unsafe fn array3d_bytes(descriptor: *const c_void) -> u64 {
    // SAFETY: the caller's promise.
    let [width, height, depth] = [0, 8, 16].map(|at| unsafe { field::<u64>(descriptor, at) });
    // SAFETY: as above.
    let [format, channels] = [24, 28].map(|at| unsafe { field::<u32>(descriptor, at) });
    elements(&[width, height, depth]).saturating_mul(element_bytes(format, channels))
}

/// A mipmapped array: each level has half the width, height and depth of the one before.
///
/// # Safety
/// The pointer is null, or to a `CUDA_ARRAY3D_DESCRIPTOR`.
pub(crate) unsafe fn mipmap_bytes(descriptor: *const c_void, levels: u32) -> u64 {
    // SAFETY: the caller's promise.
    let mut level = unsafe { array3d_bytes(descriptor) };
    // SAFETY: as above.
    let dimensions =
        [0, 8, 16].iter().filter(|at| unsafe { field::<u64>(descriptor, **at) } > 1).count().max(1);
    let mut sum = 0_u64;
    for _ in 0..levels.min(32) {
        sum = sum.saturating_add(level);
        level >>= dimensions;
    }
    sum
}

/// A dimension of zero is one that the array does not have.
fn elements(dimensions: &[u64]) -> u64 {
    dimensions.iter().fold(1, |product, dimension| product.saturating_mul((*dimension).max(1)))
}

/// `CUarray_format`: the low bits of the codes up to 0x20 say how wide a channel is; packed formats count as 4.
fn element_bytes(format: u32, channels: u32) -> u64 {
    let channel = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        _ => 4,
    };
    u64::from(channels.clamp(1, 4)) * channel
}

/// Value of a `CUmemPool_attribute`: 1 to 3 are `int`, later ones 64 bits.
///
/// # Safety
/// The pointer is null, or to the value.
pub(crate) unsafe fn pool_attribute(attribute: i32, value: *const c_void) -> u64 {
    if attribute <= 3 {
        // SAFETY: the caller's promise.
        u64::from(unsafe { field::<u32>(value, 0) })
    } else {
        // SAFETY: the caller's promise.
        unsafe { field(value, 0) }
    }
}

/// `poolProps.location`, `bytesize` and `dptr` of `CUDA_MEM_ALLOC_NODE_PARAMS`: bytes 8, 104 and 112.
pub(crate) struct GraphAlloc {
    pub(crate) location: (i32, i32),
    pub(crate) bytes: u64,
    pub(crate) addr: u64,
}

/// # Safety
/// The pointer is null, or to a `CUDA_MEM_ALLOC_NODE_PARAMS`.
pub(crate) unsafe fn graph_alloc(params: *const c_void) -> GraphAlloc {
    GraphAlloc {
        // SAFETY: the caller's promise; the structure begins with the pool's properties.
        location: unsafe { location(params) },
        // SAFETY: the caller's promise.
        bytes: unsafe { field(params, 104) },
        // SAFETY: the caller's promise.
        addr: unsafe { field(params, 112) },
    }
}

/// A node that gives memory out or takes it back.
pub(crate) enum GraphNode {
    /// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`
    Alloc,
    /// `CU_GRAPH_NODE_TYPE_MEM_FREE`, of this address.
    Free(u64),
    /// Any other.
    Other,
}

/// Where the parameters of the node's own kind begin in `CUgraphNodeParams`.
const NODE_UNION: usize = 16;

/// `type` of a `CUgraphNodeParams`, byte 0; `free.dptr`, byte 16.
///
/// # Safety
/// The pointer is null, or to such a structure.
pub(crate) unsafe fn graph_node(params: *const c_void) -> GraphNode {
    // SAFETY: the caller's promise.
    match unsafe { field::<i32>(params, 0) } {
        10 => GraphNode::Alloc,
        // SAFETY: the caller's promise.
        11 => GraphNode::Free(unsafe { field(params, NODE_UNION) }),
        _ => GraphNode::Other,
    }
}

/// The `CUDA_MEM_ALLOC_NODE_PARAMS_v2` in a `CUgraphNodeParams`: fields as in the first version.
///
/// # Safety
/// The pointer is to a `CUgraphNodeParams` of an allocation.
pub(crate) unsafe fn graph_node_alloc(params: *const c_void) -> GraphAlloc {
    // SAFETY: the caller's promise; the structure has 256 bytes.
    let alloc = unsafe { params.cast::<u8>().add(NODE_UNION) };
    // SAFETY: as above.
    unsafe { graph_alloc(alloc.cast()) }
}

/// The size of a `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`: byte 8.
///
/// # Safety
/// The pointer is null, or to such a structure.
pub(crate) unsafe fn external_bytes(description: *const c_void) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { field(description, 8) }
}

/// The size of a `CUmulticastObjectProp`: byte 8.
///
/// # Safety
/// The pointer is null, or to such a structure.
pub(crate) unsafe fn multicast_bytes(props: *const c_void) -> u64 {
    // SAFETY: the caller's promise.
    unsafe { field(props, 8) }
}

/// `flags` of the first of `n` `CUmemAccessDesc`: byte 8.
///
/// # Safety
/// The pointer is null, or to `n` such structures.
pub(crate) unsafe fn access_flags(description: *const c_void, n: usize) -> u32 {
    if n == 0 {
        return 0;
    }
    // SAFETY: the caller's promise.
    unsafe { field(description, 8) }
}

/// A handle that was written behind a pointer.
///
/// # Safety
/// The pointer is null, or to 64 bytes.
pub(crate) unsafe fn ipc_hash(handle: *const IpcMemHandle) -> u64 {
    if handle.is_null() {
        return 0;
    }
    // SAFETY: the caller's promise.
    unsafe { handle.read_unaligned() }.hash()
}

/// `CU_MEM_HANDLE_TYPE_FABRIC`, cuda.h 12.3 and later: 64 bytes, the same at both ends.
const FABRIC: i32 = 8;

/// A handle for other processes, where both ends see the same one; 0 for a file descriptor, of which each has its own.
///
/// # Safety
/// The pointer is null, or to what that kind of handle is.
pub(crate) unsafe fn fabric_hash(handle: *const c_void, kind: i32) -> u64 {
    // SAFETY: the caller's promise.
    if kind == FABRIC { unsafe { ipc_hash(handle.cast()) } } else { 0 }
}

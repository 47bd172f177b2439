//! PJRT, by which JAX and others use a GPU: its buffers lie inside the arena that its allocator took from the driver, and
//! its executables need memory of that arena while they run (`xla/pjrt/c/pjrt_c_api.h`).

use super::{Bytes, TextId};

/// A buffer came or went, an executable ran, or memory for either could not be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pjrt {
    /// What.
    pub action: PjrtAction,
    /// Which function made the buffer, or failed.
    pub origin: PjrtOrigin,
    /// Device ordinal; [`super::NO_DEVICE`] where that does not matter, or is not known.
    pub device: i16,
    /// `PJRT_Buffer *`, which another buffer may have once this one is destroyed; the client for
    /// [`PjrtAction::ClientGone`]; 0 none.
    pub buffer: u64,
    /// `PJRT_LoadedExecutable *`: which ran, and made the buffer or took it; 0 none.
    pub executable: u64,
    /// Bytes on the device (`PJRT_Buffer_OnDeviceSizeInBytes`) of a buffer that was made; for what failed what was asked
    /// for, 0 where that is not known.
    pub bytes: Bytes,
    /// `PJRT_Error_Code` of what failed (8: out of memory).
    pub code: i32,
    /// PJRT's message about the failure, cut.
    pub text: TextId,
}

/// An executable, with the compiler's own figures (`PJRT_Executable_GetCompiledMemoryStats`), where it has them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PjrtExecutable {
    /// `PJRT_LoadedExecutable *`.
    pub executable: u64,
    /// Its name: `jit_step`.
    pub name: TextId,
    /// What one execution needs beside arguments and outputs.
    pub temporary: Option<Bytes>,
    /// Its arguments.
    pub arguments: Option<Bytes>,
    /// Its outputs.
    pub outputs: Option<Bytes>,
    /// Outputs that take the memory of arguments.
    pub aliased: Option<Bytes>,
    /// Its code.
    pub code: Option<Bytes>,
}

numbered! {
    /// What a [`Pjrt`] says.
    PjrtAction {
        /// The buffer is there.
        Made = 1 "made",
        /// `PJRT_Buffer_Destroy`: the buffer is gone, and its memory unless it went before.
        Destroyed = 2 "destroyed",
        /// `PJRT_Buffer_Delete`: its memory is gone.
        Deleted = 3 "deleted",
        /// An execution took its memory over.
        Donated = 4 "donated",
        /// There was no memory.
        Failed = 5 "failed",
        /// The executable was launched.
        Executed = 6 "executed",
        /// The executable is gone.
        Unloaded = 7 "unloaded",
        /// The client is gone, and all its memory.
        ClientGone = 8 "client gone",
    }
}

numbered! {
    /// Which function of PJRT made a buffer, or failed to.
    PjrtOrigin {
        /// None, or not known.
        Unknown = 0 "unknown",
        /// `PJRT_Client_BufferFromHostBuffer`.
        FromHost = 1 "from host",
        /// `PJRT_Client_CreateUninitializedBuffer`.
        Uninitialized = 2 "uninitialized",
        /// `PJRT_Client_CreateViewOfDeviceBuffer`: the memory is another's.
        View = 3 "view",
        /// `PJRT_LoadedExecutable_Execute`.
        Execute = 4 "result",
        /// `PJRT_Buffer_CopyToDevice`, `PJRT_Buffer_CopyToMemory`.
        Copy = 5 "copy",
        /// `PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer`.
        Transfer = 6 "transfer",
        /// `PJRT_Buffer_DonateWithControlDependency`.
        Dependency = 7 "dependency",
        /// `PJRT_Client_Compile`, `PJRT_Executable_DeserializeAndLoad`.
        Compile = 8 "compile",
    }
}

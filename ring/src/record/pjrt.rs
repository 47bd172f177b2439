//! Records of PJRT, by which JAX uses a GPU.

use super::{Kind, Payload};

payloads! {
    /// A buffer of PJRT came or went, an executable ran, or memory for either could not be had.
    Pjrt Pjrt {
        /// [`PjrtAction`].
        action: u8,
        /// [`PjrtOrigin`].
        origin: u8,
        /// Unused.
        reserved: u16,
        /// `PJRT_Error_Code` of what failed; 0 none.
        code: i32,
        /// `PJRT_Buffer *`; 0 none.
        buffer: u64,
        /// `PJRT_LoadedExecutable *`; 0 none.
        executable: u64,
        /// Bytes on the device; the device ordinal in the top byte.
        device_bytes: u64,
        /// Text id of what PJRT said; 0 none.
        text: u64,
        /// Stack id; 0 none.
        stack: u64,
    }

    /// An executable of PJRT, with the compiler's own figures (`PJRT_Executable_GetCompiledMemoryStats`), `UNKNOWN` where it
    /// has none.
    PjrtExecutable PjrtExecutable {
        /// `PJRT_LoadedExecutable *`.
        executable: u64,
        /// Bytes that one execution needs beside arguments and outputs.
        temporary: u64,
        /// Bytes of its arguments.
        arguments: u64,
        /// Bytes of its outputs.
        outputs: u64,
        /// Bytes of outputs that take the memory of arguments.
        aliased: u64,
        /// Bytes of its code.
        code: u64,
        /// Text id of its name; 0 none.
        text: u64,
        /// Stack id; 0 none.
        stack: u64,
    }
}

numbered! {
    /// What a [`Pjrt`] says.
    PjrtAction: u8 {
        /// `buffer` is there.
        Made = 1,
        /// `PJRT_Buffer_Destroy`.
        Destroyed = 2,
        /// `PJRT_Buffer_Delete`.
        Deleted = 3,
        /// An execution took the buffer's memory over.
        Donated = 4,
        /// There was no memory.
        Failed = 5,
        /// `executable` was launched.
        Executed = 6,
        /// `executable` is gone.
        Unloaded = 7,
        /// The client in `buffer` is gone, and with it its memory.
        ClientGone = 8,
    }
}

numbered! {
    /// Which function of PJRT made a buffer, or failed to.
    PjrtOrigin: u8 {
        /// None, or not known.
        Unknown = 0,
        /// `PJRT_Client_BufferFromHostBuffer`.
        FromHost = 1,
        /// `PJRT_Client_CreateUninitializedBuffer`.
        Uninitialized = 2,
        /// `PJRT_Client_CreateViewOfDeviceBuffer`: the memory is another's.
        View = 3,
        /// `PJRT_LoadedExecutable_Execute`.
        Execute = 4,
        /// `PJRT_Buffer_CopyToDevice`, `PJRT_Buffer_CopyToMemory`.
        Copy = 5,
        /// `PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer`.
        Transfer = 6,
        /// `PJRT_Buffer_DonateWithControlDependency`.
        Dependency = 7,
        /// `PJRT_Client_Compile`, `PJRT_Executable_DeserializeAndLoad`.
        Compile = 8,
    }
}

//! Functions of the driver that we call ourselves. The loader finds them together with the rows.

use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering};

/// Writes the table and the list of its slots.
macro_rules! auxiliary {
    ($($name:ident = $symbol:literal),* $(,)?) => {
        /// The real functions that are not rows.
        pub(crate) struct Auxiliary { $( pub(crate) $name: Slot, )* }

        /// The real functions that are not rows.
        pub(crate) static AUXILIARY: Auxiliary = Auxiliary { $( $name: Slot::new($symbol), )* };

        impl Auxiliary {
            /// Every slot.
            pub(crate) fn slots(&self) -> [&Slot; [$( stringify!($name), )*].len()] {
                [$( &self.$name, )*]
            }
        }
    };
}

auxiliary! {
    context_device = c"cuCtxGetDevice",
    stream_is_capturing = c"cuStreamIsCapturing",
    device_count = c"cuDeviceGetCount",
    device_get = c"cuDeviceGet",
    device_name = c"cuDeviceGetName",
    device_uuid = c"cuDeviceGetUuid",
    device_uuid_v2 = c"cuDeviceGetUuid_v2",
    device_total = c"cuDeviceTotalMem_v2",
    event_create = c"cuEventCreate",
    event_record = c"cuEventRecord",
    event_query = c"cuEventQuery",
    event_elapsed = c"cuEventElapsedTime",
    event_elapsed_v2 = c"cuEventElapsedTime_v2",
    stream_context = c"cuStreamGetCtx",
    context_push = c"cuCtxPushCurrent_v2",
    context_pop = c"cuCtxPopCurrent_v2",
    exchange_capture_mode = c"cuThreadExchangeStreamCaptureMode",
    primary_state = c"cuDevicePrimaryCtxGetState",
}

/// A real function by name.
pub(crate) struct Slot {
    /// The exported symbol.
    pub(crate) name: &'static CStr,
    address: AtomicUsize,
}

impl Slot {
    const fn new(name: &'static CStr) -> Slot {
        Slot { name, address: AtomicUsize::new(0) }
    }

    /// Remembers where it is.
    pub(crate) fn set(&self, address: usize) {
        self.address.store(address, Ordering::Release);
    }

    /// The function, if it was found.
    ///
    /// # Safety
    /// `F` is the type of a pointer to this very function.
    pub(crate) unsafe fn get<F: Copy>(&self) -> Option<F> {
        let address = self.address.load(Ordering::Acquire);
        // SAFETY: a function pointer is as large as an address; the caller knows its type.
        (address != 0).then(|| unsafe { core::mem::transmute_copy(&address) })
    }
}

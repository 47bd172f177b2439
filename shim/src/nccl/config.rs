//! `ncclConfig_t`, which grows at its end with every release: read only as far as the program says that it goes.

use crate::sys::c_bytes;
use core::ffi::{c_char, c_void};

/// `NCCL_API_MAGIC` of the structure (nccl.h, 2.14 to 2.32).
const MAGIC: u32 = 0xcafe_beef;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: i32 = i32::MIN;
/// The most bytes of a name that are kept.
const MOST_NAME: usize = 256;

// Offsets (nccl.h of each release, sizes compiled): size 0, magic 8, version 12, then the fields.
const BLOCKING: usize = 16;
const CGA_CLUSTER_SIZE: usize = 20;
const MIN_CTAS: usize = 24;
const MAX_CTAS: usize = 28;
const NET_NAME: usize = 32;
const SPLIT_SHARE: usize = 40;
const TRAFFIC_CLASS: usize = 44;
const NAME: usize = 48;
const NVLS_CTAS: usize = 68;
const MAX_P2P_PEERS: usize = 88;
/// 2.26 put `trafficClass` where padding was: only the version tells.
const TRAFFIC_CLASS_SINCE: u32 = 2_26_00;

/// What a program asked for.
#[derive(Clone, Copy)]
pub(crate) struct Config<'a> {
    pub(crate) numbers: [i32; 8],
    pub(crate) name: &'a [u8],
    pub(crate) net_name: &'a [u8],
}

impl<'a> Config<'a> {
    pub(crate) const NONE: Config<'static> = Config { numbers: [UNDEFINED; 8], name: &[], net_name: &[] };

    /// # Safety
    /// `config` is null or what the program gives to NCCL; the result is used before that call returns, or right after.
    pub(crate) unsafe fn read(config: *const c_void) -> Config<'a> {
        if config.is_null() {
            return Config::NONE;
        }
        // SAFETY: every version of the structure begins with its size, magic number and version.
        let size = unsafe { config.cast::<usize>().read_unaligned() };
        // SAFETY: as above.
        let [magic, version] =
            [8, 12].map(|at| unsafe { config.byte_add(at).cast::<u32>().read_unaligned() });
        if magic != MAGIC {
            return Config::NONE;
        }
        let number = |at: usize| {
            if at + size_of::<i32>() > size {
                return UNDEFINED;
            }
            // SAFETY: the program says that the structure reaches so far.
            unsafe { config.byte_add(at).cast::<i32>().read_unaligned() }
        };
        let text = |at: usize| {
            if at + size_of::<usize>() > size {
                return [].as_slice();
            }
            // SAFETY: as above.
            let text = unsafe { config.byte_add(at).cast::<*const c_char>().read_unaligned() };
            // SAFETY: null, or a C string that NCCL reads too.
            let text: &'a [u8] = unsafe { c_bytes(text) };
            text.get(..MOST_NAME).unwrap_or(text)
        };
        let traffic_class = if version >= TRAFFIC_CLASS_SINCE { number(TRAFFIC_CLASS) } else { UNDEFINED };
        Config {
            numbers: [
                number(BLOCKING),
                number(CGA_CLUSTER_SIZE),
                number(MIN_CTAS),
                number(MAX_CTAS),
                number(SPLIT_SHARE),
                traffic_class,
                number(NVLS_CTAS),
                number(MAX_P2P_PEERS),
            ],
            name: text(NAME),
            net_name: text(NET_NAME),
        }
    }

    /// Whether calls return before they are done.
    pub(crate) fn returns_early(&self) -> bool {
        self.numbers.first() == Some(&0)
    }
}

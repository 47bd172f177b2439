//! The devices of a process, which are sent once the session lives: these are calls into the driver, in which anything
//! may happen to a thread.

use crate::auxiliary::AUXILIARY;
use crate::session;
use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicU32, Ordering};
use gputrace_ring::record::Device;
use gputrace_ring::ring::Producer;

/// The session that the devices were sent to; 0 none. Two threads may send them at once; the recorder keeps the first.
static TOLD: AtomicU32 = AtomicU32::new(0);

/// Whether this session knows them.
pub(crate) fn are_known() -> bool {
    TOLD.load(Ordering::Relaxed) == session::generation() as u32
}

/// Sends the devices if nobody has, and the driver is ready.
pub(crate) fn describe(producer: &mut Producer) {
    if !are_known() && describe_all(producer) {
        TOLD.store(session::generation() as u32, Ordering::Relaxed);
    }
}

/// The one device that this process sees; `None` where there are several, or it cannot be asked for. Asked once: it holds for as long as the
/// process lives.
#[inline]
pub(crate) fn only() -> Option<i32> {
    match N_DEVICES.load(Ordering::Relaxed) {
        UNASKED => count_once(),
        1 => Some(0),
        _ => None,
    }
}

const UNASKED: u32 = u32::MAX;
static N_DEVICES: AtomicU32 = AtomicU32::new(UNASKED);

/// For a thread that has just got memory of a device.
#[cold]
fn count_once() -> Option<i32> {
    type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the type is that of cuda.h 13.0 for this name, unchanged since 2.0.
    let count = unsafe { AUXILIARY.device_count.get::<Count>() }?;
    let mut devices = 0;
    // SAFETY: the out-parameter is ours.
    let is_known = unsafe { count(&raw mut devices) } == 0;
    N_DEVICES.store(if is_known { devices as u32 } else { 0 }, Ordering::Relaxed);
    (is_known && devices == 1).then_some(0)
}

/// The devices of this process; false if they cannot be asked for yet. None of these calls needs or makes a context.
fn describe_all(producer: &mut Producer) -> bool {
    type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
    type Name = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type Uuid = unsafe extern "C" fn(*mut [u8; 16], c_int) -> c_int;
    type Total = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    // SAFETY: the type is that of cuda.h 13.0 for this name, unchanged since 2.0.
    let Some(count) = (unsafe { AUXILIARY.device_count.get::<Count>() }) else { return false };
    // SAFETY: as above.
    let Some(get) = (unsafe { AUXILIARY.device_get.get::<Get>() }) else { return false };
    // SAFETY: as above.
    let Some(name) = (unsafe { AUXILIARY.device_name.get::<Name>() }) else { return false };
    // SAFETY: as above, since 3.2.
    let Some(total) = (unsafe { AUXILIARY.device_total.get::<Total>() }) else { return false };
    // SAFETY: as above, since 11.4.
    let uuid_v2 = unsafe { AUXILIARY.device_uuid_v2.get::<Uuid>() };
    // SAFETY: as above, since 9.2.
    let uuid = uuid_v2.or(unsafe { AUXILIARY.device_uuid.get::<Uuid>() });
    let mut devices = 0;
    // SAFETY: the out-parameter is ours.
    if unsafe { count(&raw mut devices) } != 0 {
        return false;
    }
    for ordinal in 0..devices.clamp(0, 64) {
        let (mut device, mut bytes, mut text, mut id) = (0, 0_usize, [0_u8; 128], [0_u8; 16]);
        // SAFETY: the out-parameter is ours.
        if unsafe { get(&raw mut device, ordinal) } != 0 {
            continue;
        }
        // SAFETY: the buffer is as long as we say; one byte stays zero.
        unsafe { name(text.as_mut_ptr().cast(), 127, device) };
        // SAFETY: the out-parameter is ours.
        unsafe { total(&raw mut bytes, device) };
        if let Some(uuid) = uuid {
            // SAFETY: the out-parameter is ours.
            unsafe { uuid(&raw mut id, device) };
        }
        let text = CStr::from_bytes_until_nul(&text).unwrap_or_default().to_bytes();
        let (low, high) = id.split_at(8);
        let half = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let record = Device {
            ordinal: ordinal as u32,
            name: text.len() as u32,
            uuid_low: half(low),
            uuid_high: half(high),
            total: bytes as u64,
        };
        let at = producer.now();
        producer.push_with(at, 0, &record, &[text]);
    }
    true
}

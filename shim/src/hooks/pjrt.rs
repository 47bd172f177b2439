//! PJRT, by which JAX and others use a GPU: the functions that make, take and use buffers.
//!
//! Programs load a plugin and ask it for its table of functions (`dlsym(plugin, "GetPjrtApi")`). They get a copy of the table
//! in which some functions are ours; the plugin's own is not changed. Each of ours calls the real one once, with the
//! program's arguments, and hands on what that answered.
//!
//! A buffer is known by its address. What gives memory is recorded after the call, what takes it back before: another thread
//! may be handed the same address at once. The plugin is asked for a buffer's size and place, which it knows without
//! waiting for the GPU; never for its address, for which it may wait.

use crate::callsite;
use crate::elf;
use crate::lanes;
use crate::nvtx::{self, MOST_TEXT};
use crate::pjrt::{self, BANKS, Function, GetApi, Known, Place, Question, Table, UNKNOWN_DEVICE, field};
use crate::session::{self, Start};
use crate::sys::{KeepErrno, Text};
use core::ffi::c_void;
use core::ptr::null_mut;
use gputrace_ring::record::{Kind, Pjrt, PjrtAction, PjrtExecutable, PjrtOrigin, UNKNOWN, pack_device};
use gputrace_ring::ring::Producer;

/// `PJRT_Error_Code_RESOURCE_EXHAUSTED`.
const RESOURCE_EXHAUSTED: i32 = 8;
/// No execution has so many devices, arguments or results.
const MOST: usize = 1 << 20;

/// Each bank's own functions, because none is told which plugin it was called for.
macro_rules! banks {
    ($($bank:literal)*) => {
        static GETTERS: [GetApi; BANKS] = [$(get_api::<$bank>),*];
    };
}
banks!(0 1 2 3);

fn ours<const B: usize>() -> [(Place, Function); 17] {
    [
        (Place::ErrorDestroy, error_destroy::<B>),
        (Place::ErrorMessage, error_message::<B>),
        (Place::ClientCreate, client_create::<B>),
        (Place::ClientDestroy, client_destroy::<B>),
        (Place::ClientCompile, client_compile::<B>),
        (Place::ExecutableDeserializeAndLoad, deserialize_and_load::<B>),
        (Place::LoadedExecutableDestroy, executable_destroy::<B>),
        (Place::LoadedExecutableExecute, execute::<B>),
        (Place::ClientBufferFromHostBuffer, from_host::<B>),
        (Place::ClientCreateUninitializedBuffer, uninitialized::<B>),
        (Place::ClientCreateViewOfDeviceBuffer, view::<B>),
        (Place::BufferDestroy, buffer_destroy::<B>),
        (Place::BufferDelete, buffer_delete::<B>),
        (Place::BufferCopyToDevice, copy_to_device::<B>),
        (Place::BufferCopyToMemory, copy_to_memory::<B>),
        (Place::TransferManagerRetrieveBuffer, retrieve_buffer::<B>),
        (Place::BufferDonateWithControlDependency, donate::<B>),
    ]
}

/// Our function for the `GetPjrtApi` that `dlsym` found.
#[cold]
pub(crate) fn ours_for(found: usize, caller: usize) -> Option<*const ()> {
    let _errno = KeepErrno::new();
    let library = elf::by_address(found)?;
    // A plugin's own look-ups are its own business, and what stands in another library's place is that one's.
    if session::is_over() || library.is_ours() || library.contains(caller) {
        return None;
    }
    match pjrt::bank_of(found, &library) {
        Some(bank) => GETTERS.get(bank).map(|get| *get as *const ()),
        None => {
            note(b"pjrt.buffers=unseen: the process has more than four plugins");
            None
        }
    }
}

/// `const PJRT_Api *GetPjrtApi()`.
unsafe extern "C" fn get_api<const B: usize>() -> *const usize {
    let table = pjrt::table(B, &ours::<B>());
    let _errno = KeepErrno::new();
    match table {
        Some(Table::New(table)) => {
            if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
                describe_one(lane.producer(), B);
            }
            table
        }
        Some(Table::Known(table)) => table,
        None => core::ptr::null(),
    }
}

/// Says in the trace which plugins are seen.
pub(crate) fn describe(producer: &mut Producer) {
    (0..BANKS).for_each(|bank| describe_one(producer, bank));
}

fn describe_one(producer: &mut Producer, bank: usize) {
    let text = match pjrt::known(bank) {
        Some(Ok(minor)) => Text::<128>::new().add(b"pjrt.buffers=seen: PJRT 0.").number(u64::from(minor)),
        Some(Err(why)) => Text::new().add(b"pjrt.buffers=unseen: ").add(why),
        None => return,
    };
    let at = producer.now();
    producer.push_raw(at, Kind::Note, &[text.as_bytes()]);
}

fn note(text: &[u8]) {
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        let producer = lane.producer();
        let at = producer.now();
        producer.push_raw(at, Kind::Note, &[text]);
    }
}

/// Calls the plugin's own function. Where the plugin is gone, nobody can have meant to call it.
///
/// # Safety
/// The arguments are those of that function.
unsafe fn real<const B: usize>(place: Place, arguments: *mut usize) -> *mut c_void {
    match pjrt::real(B, place) {
        // SAFETY: the caller's promise.
        Some(function) => unsafe { function(arguments) },
        None => null_mut(),
    }
}

/// `PJRT_Client_Create(PJRT_Client_Create_Args *)`: the client is the ninth word.
unsafe extern "C" fn client_create<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    let error = unsafe { real::<B>(Place::ClientCreate, arguments) };
    let _errno = KeepErrno::new();
    if error.is_null()
        && let Some(client) = field(arguments, 8)
    {
        pjrt::note_client(B, client);
    }
    error
}

/// `PJRT_Client_Destroy(PJRT_Client_Destroy_Args *)`.
unsafe extern "C" fn client_destroy<const B: usize>(arguments: *mut usize) -> *mut c_void {
    let client = field(arguments, 2).unwrap_or_default();
    if client != 0 {
        let _errno = KeepErrno::new();
        if pjrt::is_gpu(B) {
            push(PjrtAction::ClientGone, client, 0);
        }
        pjrt::forget_all();
    }
    // SAFETY: the program's own arguments.
    unsafe { real::<B>(Place::ClientDestroy, arguments) }
}

/// `PJRT_Client_Compile(PJRT_Client_Compile_Args *)`: the executable is the seventh word.
unsafe extern "C" fn client_compile<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    let error = unsafe { real::<B>(Place::ClientCompile, arguments) };
    loaded::<B>(arguments, 6, error);
    error
}

/// `PJRT_Executable_DeserializeAndLoad(PJRT_Executable_DeserializeAndLoad_Args *)`.
unsafe extern "C" fn deserialize_and_load<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    let error = unsafe { real::<B>(Place::ExecutableDeserializeAndLoad, arguments) };
    loaded::<B>(arguments, 5, error);
    error
}

#[cold]
fn loaded<const B: usize>(arguments: *const usize, at: usize, error: *mut c_void) {
    if !pjrt::is_gpu(B) || !session::is_live() {
        return;
    }
    let _errno = KeepErrno::new();
    if !error.is_null() {
        failed::<B>(error as usize, 0, UNKNOWN_DEVICE, PjrtOrigin::Compile);
    } else if let Some(executable) = field(arguments, at).filter(|executable| *executable != 0) {
        learn::<B>(executable);
    }
}

/// Asks what an executable needs, tells it, and remembers what its executions need to know.
#[cold]
fn learn<const B: usize>(loaded: usize) -> Option<Known> {
    let mut question = Question::about(loaded);
    if !question.ask(B, Place::LoadedExecutableGetExecutable) {
        return None;
    }
    let executable = question.answer(3);
    let mut outputs = Question::about(executable);
    let n_outputs = outputs.ask(B, Place::ExecutableNumOutputs).then(|| outputs.answer(3));
    let mut name = Question::about(executable);
    let mut text = [0_u8; MOST_TEXT];
    let length = match name.ask(B, Place::ExecutableName) {
        true => keep_text(name.answer(3), name.answer(4), &mut text),
        false => 0,
    };
    let mut stats = Question::about(executable);
    let has_stats = stats.ask(B, Place::ExecutableGetCompiledMemoryStats);
    let figure = |at: usize| if has_stats { stats.answer(at) as u64 } else { UNKNOWN };
    let mut record = PjrtExecutable {
        executable: loaded as u64,
        code: figure(3),
        arguments: figure(4),
        outputs: figure(5),
        aliased: figure(6),
        temporary: figure(7),
        text: 0,
        stack: 0,
    };
    // What was made of a loaded executable for our question is ours to give back.
    let mut destroy = Question::about(executable);
    destroy.ask(B, Place::ExecutableDestroy);
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        record.stack = callsite::capture(&mut lane, callsite::Of::Pjrt);
        let (producer, rest) = lane.parts();
        record.text = nvtx::text_id(producer, &mut rest.texts, text.get(..length).unwrap_or_default());
        producer.push(session::now(), 0, &record);
    }
    let n_outputs = u32::try_from(n_outputs?).ok().filter(|n| (*n as usize) < MOST)?;
    // Where nothing is aliased, nothing is donated.
    let known = Known { n_outputs, may_donate: !has_stats || record.aliased != 0 };
    pjrt::remember_executable(loaded, known);
    Some(known)
}

/// Copies a text of the plugin's; how much of it there is room for.
fn keep_text(text: usize, length: usize, into: &mut [u8; MOST_TEXT]) -> usize {
    let length = length.min(MOST_TEXT);
    if text == 0 {
        return 0;
    }
    // SAFETY: the plugin says that its text is so long, and it lives as long as the object that was asked.
    let text = unsafe { core::slice::from_raw_parts(text as *const u8, length) };
    for (to, from) in into.iter_mut().zip(text) {
        *to = *from;
    }
    length
}

/// `PJRT_LoadedExecutable_Destroy(PJRT_LoadedExecutable_Destroy_Args *)`.
unsafe extern "C" fn executable_destroy<const B: usize>(arguments: *mut usize) -> *mut c_void {
    let executable = field(arguments, 2).unwrap_or_default();
    if executable != 0 {
        let _errno = KeepErrno::new();
        if pjrt::is_gpu(B) {
            push(PjrtAction::Unloaded, 0, executable);
        }
        pjrt::forget_executable(executable);
    }
    // SAFETY: the program's own arguments.
    unsafe { real::<B>(Place::LoadedExecutableDestroy, arguments) }
}

/// `PJRT_LoadedExecutable_Execute(PJRT_LoadedExecutable_Execute_Args *)`.
unsafe extern "C" fn execute<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    let error = unsafe { real::<B>(Place::LoadedExecutableExecute, arguments) };
    if pjrt::is_gpu(B) && session::is_live() {
        let _errno = KeepErrno::new();
        // SAFETY: as above: what the structure points at is the program's until its call returns.
        unsafe { executed::<B>(arguments, error as usize) };
    }
    error
}

/// # Safety
/// The arguments are those of an execution that has just answered this error.
unsafe fn executed<const B: usize>(arguments: *const usize, error: usize) {
    let (Some(executable), Some(inputs), Some(n_devices), Some(n_inputs), Some(outputs)) = (
        field(arguments, 2),
        field(arguments, 4),
        field(arguments, 5),
        field(arguments, 6),
        field(arguments, 7),
    ) else {
        return;
    };
    let Some(known) = pjrt::executable(executable).or_else(|| learn::<B>(executable)) else { return };
    if n_devices > MOST || n_inputs > MOST {
        return;
    }
    let stack = capture();
    for number in 0..n_devices {
        // SAFETY: one list of arguments, and one of results, for each device.
        let (inputs, outputs) = unsafe { (element(inputs, number), element(outputs, number)) };
        // SAFETY: as many results as the executable has.
        let outputs_of = |at: usize| unsafe { element(outputs, at) };
        // SAFETY: as many arguments as the program said.
        let inputs_of = |at: usize| unsafe { element(inputs, at) };
        let n_outputs = if error == 0 { known.n_outputs as usize } else { 0 };
        let some_buffer = (0..n_outputs).map(outputs_of).chain((0..n_inputs).map(inputs_of));
        let device =
            some_buffer.filter(|buffer| *buffer != 0).take(1).map(|buffer| pjrt::device_of(B, buffer));
        let device = device.last().unwrap_or(UNKNOWN_DEVICE);
        if error != 0 {
            failed::<B>(error, executable, device, PjrtOrigin::Execute);
        } else {
            let mut record = of(PjrtAction::Executed, PjrtOrigin::Execute, 0, executable, stack);
            record.device_bytes = pack_device(device, 0);
            send(&record);
        }
        // A failed execution has taken its arguments too, if it came so far.
        for at in 0..if known.may_donate { n_inputs } else { 0 } {
            let buffer = inputs_of(at);
            if buffer != 0 && pjrt::is_deleted(B, buffer) {
                send(&of(PjrtAction::Donated, PjrtOrigin::Unknown, buffer, executable, 0));
            }
        }
        // Results may have the memory of arguments, which are gone by now.
        for at in 0..n_outputs {
            made::<B>(outputs_of(at), executable, PjrtOrigin::Execute, stack);
        }
    }
}

/// An element of a list of pointers; 0 where there is no list.
///
/// # Safety
/// The list has more elements than that.
unsafe fn element(list: usize, at: usize) -> usize {
    // SAFETY: the caller's promise.
    if list == 0 { 0 } else { unsafe { *(list as *const usize).wrapping_add(at) } }
}

/// A function that makes one buffer: calls it, and tells what it made or why not.
unsafe fn makes<const B: usize>(
    place: Place,
    arguments: *mut usize,
    at: usize,
    origin: PjrtOrigin,
) -> *mut c_void {
    // SAFETY: the program's own arguments.
    let error = unsafe { real::<B>(place, arguments) };
    if pjrt::is_gpu(B) && session::is_live() {
        let _errno = KeepErrno::new();
        if !error.is_null() {
            failed::<B>(error as usize, 0, UNKNOWN_DEVICE, origin);
        } else if let Some(buffer) = field(arguments, at) {
            made::<B>(buffer, 0, origin, capture());
        }
    }
    error
}

/// `PJRT_Client_BufferFromHostBuffer(PJRT_Client_BufferFromHostBuffer_Args *)`.
unsafe extern "C" fn from_host<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    unsafe { makes::<B>(Place::ClientBufferFromHostBuffer, arguments, 14, PjrtOrigin::FromHost) }
}

/// `PJRT_Client_CreateUninitializedBuffer(PJRT_Client_CreateUninitializedBuffer_Args *)`.
unsafe extern "C" fn uninitialized<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    unsafe { makes::<B>(Place::ClientCreateUninitializedBuffer, arguments, 9, PjrtOrigin::Uninitialized) }
}

/// `PJRT_Client_CreateViewOfDeviceBuffer(PJRT_Client_CreateViewOfDeviceBuffer_Args *)`.
unsafe extern "C" fn view<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    unsafe { makes::<B>(Place::ClientCreateViewOfDeviceBuffer, arguments, 12, PjrtOrigin::View) }
}

/// `PJRT_Buffer_CopyToDevice(PJRT_Buffer_CopyToDevice_Args *)`.
unsafe extern "C" fn copy_to_device<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    unsafe { makes::<B>(Place::BufferCopyToDevice, arguments, 4, PjrtOrigin::Copy) }
}

/// `PJRT_Buffer_CopyToMemory(PJRT_Buffer_CopyToMemory_Args *)`.
unsafe extern "C" fn copy_to_memory<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    unsafe { makes::<B>(Place::BufferCopyToMemory, arguments, 4, PjrtOrigin::Copy) }
}

/// `PJRT_AsyncHostToDeviceTransferManager_RetrieveBuffer(...)`.
unsafe extern "C" fn retrieve_buffer<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    unsafe { makes::<B>(Place::TransferManagerRetrieveBuffer, arguments, 4, PjrtOrigin::Transfer) }
}

/// `PJRT_Buffer_DonateWithControlDependency(...)`: another buffer has the memory afterwards.
unsafe extern "C" fn donate<const B: usize>(arguments: *mut usize) -> *mut c_void {
    let place = Place::BufferDonateWithControlDependency;
    // SAFETY: the program's own arguments.
    let error = unsafe { makes::<B>(place, arguments, 5, PjrtOrigin::Dependency) };
    if error.is_null() && pjrt::is_gpu(B) {
        let _errno = KeepErrno::new();
        push(PjrtAction::Donated, field(arguments, 2).unwrap_or_default(), 0);
    }
    error
}

/// `PJRT_Buffer_Destroy(PJRT_Buffer_Destroy_Args *)`.
unsafe extern "C" fn buffer_destroy<const B: usize>(arguments: *mut usize) -> *mut c_void {
    if pjrt::is_gpu(B) {
        push(PjrtAction::Destroyed, field(arguments, 2).unwrap_or_default(), 0);
    }
    // SAFETY: the program's own arguments.
    unsafe { real::<B>(Place::BufferDestroy, arguments) }
}

/// `PJRT_Buffer_Delete(PJRT_Buffer_Delete_Args *)`.
unsafe extern "C" fn buffer_delete<const B: usize>(arguments: *mut usize) -> *mut c_void {
    if pjrt::is_gpu(B) {
        push(PjrtAction::Deleted, field(arguments, 2).unwrap_or_default(), 0);
    }
    // SAFETY: the program's own arguments.
    unsafe { real::<B>(Place::BufferDelete, arguments) }
}

/// `PJRT_Error_Message(PJRT_Error_Message_Args *)`: whoever meets an error asks what it says, also where the GPU's work was
/// only waited for.
unsafe extern "C" fn error_message<const B: usize>(arguments: *mut usize) -> *mut c_void {
    // SAFETY: the program's own arguments.
    let nothing = unsafe { real::<B>(Place::ErrorMessage, arguments) };
    if let Some(error) = field(arguments, 2)
        && pjrt::is_gpu(B)
        && session::is_live()
    {
        let _errno = KeepErrno::new();
        failed::<B>(error, 0, UNKNOWN_DEVICE, PjrtOrigin::Unknown);
    }
    nothing
}

/// `PJRT_Error_Destroy(PJRT_Error_Destroy_Args *)`.
unsafe extern "C" fn error_destroy<const B: usize>(arguments: *mut usize) -> *mut c_void {
    if let Some(error) = field(arguments, 2) {
        pjrt::forget_error(error);
    }
    // SAFETY: the program's own arguments.
    unsafe { real::<B>(Place::ErrorDestroy, arguments) }
}

/// Tells that memory could not be had, if that is what the error says, and once an error.
#[cold]
fn failed<const B: usize>(error: usize, executable: usize, device: i8, origin: PjrtOrigin) {
    let mut question = Question::about(error);
    if error == 0 || !question.ask(B, Place::ErrorGetCode) {
        return;
    }
    let code = question.answer(3) as i32;
    if code != RESOURCE_EXHAUSTED || pjrt::is_known_error(error) {
        return;
    }
    pjrt::remember_error(error);
    let mut question = Question::about(error);
    let mut text = [0_u8; MOST_TEXT];
    let length = match question.tell(B, Place::ErrorMessage) {
        true => keep_text(question.answer(3), question.answer(4), &mut text),
        false => 0,
    };
    let Some(mut lane) = lanes::lane(Start::OnlyIfLive) else { return };
    let stack = callsite::capture(&mut lane, callsite::Of::Pjrt);
    let mut record = of(PjrtAction::Failed, origin, 0, executable, stack);
    record.code = code;
    record.device_bytes = pack_device(device, 0);
    let (producer, rest) = lane.parts();
    record.text = nvtx::text_id(producer, &mut rest.texts, text.get(..length).unwrap_or_default());
    producer.push(session::now(), 0, &record);
}

fn made<const B: usize>(buffer: usize, executable: usize, origin: PjrtOrigin, stack: u64) {
    if buffer == 0 {
        return;
    }
    let (device, bytes) = (pjrt::device_of(B, buffer), pjrt::bytes_of(B, buffer));
    // Memory of the host is not what a GPU runs out of.
    if device != pjrt::HOST {
        let mut record = of(PjrtAction::Made, origin, buffer, executable, stack);
        record.device_bytes = pack_device(device, bytes);
        send(&record);
    }
}

fn of(action: PjrtAction, origin: PjrtOrigin, buffer: usize, executable: usize, stack: u64) -> Pjrt {
    Pjrt {
        action: action as u8,
        origin: origin as u8,
        reserved: 0,
        code: 0,
        buffer: buffer as u64,
        executable: executable as u64,
        device_bytes: pack_device(UNKNOWN_DEVICE, 0),
        text: 0,
        stack,
    }
}

fn capture() -> u64 {
    let lane = lanes::lane(Start::OnlyIfLive);
    lane.map_or(0, |mut lane| callsite::capture(&mut lane, callsite::Of::Pjrt))
}

fn push(action: PjrtAction, buffer: usize, executable: usize) {
    if buffer != 0 || executable != 0 {
        send(&of(action, PjrtOrigin::Unknown, buffer, executable, 0));
    }
}

fn send(record: &Pjrt) {
    if let Some(mut lane) = lanes::lane(Start::OnlyIfLive) {
        lane.producer().push(session::now(), 0, record);
    }
}

//! Native frames are libgcc's: in recursion, in signal handlers, in generated code, while libraries come and go.

mod common;

use common::{addresses, harness};
use gputrace_skip::skip;
use std::ffi::{CString, c_int, c_void};
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The harness then behaves as with a C library before 2.35.
const OLD_GLIBC: &str = "STACK_HARNESS_OLD_GLIBC";

fn is_old_glibc() -> bool {
    std::env::var_os(OLD_GLIBC).is_some()
}

/// Held by tests that load and unload: while a thread is inside of `dlclose`, what is new to us is not read, where nothing of the C
/// library guards it, and its stack is marked as cut.
static LIBRARIES: Mutex<()> = Mutex::new(());

const SAME: c_int = 1;
const SAME_AND_MARKED: c_int = 2;

/// Calls `leaf` at the bottom of frames of changing size.
#[inline(never)]
fn descend(depth: u32, leaf: &mut dyn FnMut()) {
    if depth == 0 {
        return leaf();
    }
    match depth % 3 {
        0 => descend_with_room(depth - 1, leaf),
        1 => descend_in_closure(depth - 1, leaf),
        _ => descend(depth - 1, leaf),
    }
    black_box(depth);
}

#[inline(never)]
fn descend_with_room(depth: u32, leaf: &mut dyn FnMut()) {
    let mut room = [depth; 100];
    black_box(&mut room);
    descend(depth, leaf);
    black_box(&mut room);
}

#[inline(never)]
fn descend_in_closure(depth: u32, leaf: &mut dyn FnMut()) {
    let call = move |leaf: &mut dyn FnMut()| descend(depth, leaf);
    let call: &dyn Fn(&mut dyn FnMut()) = black_box(&call);
    call(leaf);
}

#[test]
fn frames_are_those_of_libgcc_at_every_depth_whatever_was_captured_before() {
    for depth in (0..120).chain([5, 119, 0, 60, 61, 61, 60]) {
        descend(depth, &mut || {
            for _ in 0..3 {
                assert_eq!((harness().compare)(), SAME);
            }
        });
    }
}

#[test]
fn a_stack_too_deep_to_keep_is_cut_and_marked_and_the_next_one_is_whole() {
    for depth in [1000, 1000, 10, 1001, 100, 1000, 30] {
        let expected = if depth > 100 { SAME_AND_MARKED } else { SAME };
        descend(depth, &mut || assert_eq!((harness().compare)(), expected));
    }
}

#[test]
fn a_new_thread_has_its_own_whole_stack() {
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| descend(40, &mut || assert_eq!((harness().compare)(), SAME)));
        }
    });
}

static HANDLED: AtomicU64 = AtomicU64::new(0);
static DIFFERENT: AtomicU64 = AtomicU64::new(0);
static MARKED: AtomicU64 = AtomicU64::new(0);

extern "C" fn on_signal(_: c_int) {
    match (harness().compare)() {
        SAME => HANDLED.fetch_add(1, Ordering::Relaxed),
        SAME_AND_MARKED => MARKED.fetch_add(1, Ordering::Relaxed),
        0 => DIFFERENT.fetch_add(1, Ordering::Relaxed),
        _ => 0,
    };
}

#[test]
fn a_signal_handler_sees_the_interrupted_frames_on_either_stack() {
    harness();
    let mut room = vec![0u8; 1 << 20];
    let stack = libc::stack_t { ss_sp: room.as_mut_ptr().cast(), ss_flags: 0, ss_size: room.len() };
    let mut before_stack = libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: 0, ss_size: 0 };
    // SAFETY: the room outlives the handlers, which are removed below.
    assert_eq!(unsafe { libc::sigaltstack(&raw const stack, &raw mut before_stack) }, 0);
    // SAFETY: no precondition.
    let target = unsafe { libc::pthread_self() } as u64;
    for flags in [0, libc::SA_ONSTACK] {
        // SAFETY: all zeros is a valid action.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_signal as *const () as usize;
        action.sa_flags = flags | libc::SA_RESTART;
        // SAFETY: a handler that only captures.
        unsafe { libc::sigaction(libc::SIGPROF, &raw const action, std::ptr::null_mut()) };
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // To this thread only: the stacks that the runtime gives others for signals are too small to compare on.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::thread::sleep(std::time::Duration::from_micros(200));
                    // SAFETY: the thread waits for this one.
                    unsafe { libc::pthread_kill(target as libc::pthread_t, libc::SIGPROF) };
                }
            });
            let before = HANDLED.load(Ordering::Relaxed);
            let mut sum = 0u64;
            while HANDLED.load(Ordering::Relaxed) < before + 500 {
                descend(20, &mut || {
                    let mut numbers: Vec<u64> = (0..200).map(|i| i * 7919 % 101).collect();
                    numbers.sort_unstable_by(|a, b| b.cmp(a));
                    sum += numbers.iter().sum::<u64>() + format!("{numbers:?}").len() as u64;
                    (harness().compare)();
                });
            }
            black_box(sum);
            stop.store(true, Ordering::Relaxed);
        });
    }
    // SAFETY: no signal is under way any more.
    unsafe { libc::signal(libc::SIGPROF, libc::SIG_IGN) };
    // SAFETY: what the thread had before.
    unsafe { libc::sigaltstack(&raw const before_stack, std::ptr::null_mut()) };
    let marked = MARKED.load(Ordering::Relaxed);
    assert_eq!(DIFFERENT.load(Ordering::Relaxed), 0);
    assert!(
        marked * 20 < HANDLED.load(Ordering::Relaxed),
        "{marked} stacks could not be walked to their end"
    );
}

#[test]
fn generated_code_with_a_frame_pointer_does_not_end_the_stack() {
    // push rbp; mov rbp, rsp; call rdi; pop rbp; ret
    #[cfg(target_arch = "x86_64")]
    let (code, returns_to) = ([0x55, 0x48, 0x89, 0xe5, 0xff, 0xd7, 0x5d, 0xc3u8], 6);
    // stp x29, x30, [sp, #-16]!; mov x29, sp; blr x0; ldp x29, x30, [sp], #16; ret
    #[cfg(target_arch = "aarch64")]
    let (code, returns_to) = (
        [0xa9bf_7bfd, 0x9100_03fd, 0xd63f_0000, 0xa8c1_7bfd, 0xd65f_03c0_u32].map(u32::to_le_bytes).concat(),
        12,
    );
    // SAFETY: a new mapping.
    let page = unsafe {
        let protection = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        libc::mmap(std::ptr::null_mut(), 4096, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    assert_ne!(page, libc::MAP_FAILED);
    // SAFETY: the page is writable and longer.
    unsafe { page.cast::<u8>().copy_from_nonoverlapping(code.as_ptr(), code.len()) };
    // SAFETY: the bytes above are such a function.
    let generated: extern "C" fn(extern "C" fn()) = unsafe { std::mem::transmute(page) };
    thread_local!(static FOUND: std::cell::RefCell<Vec<u64>> = const { std::cell::RefCell::new(Vec::new()) });
    extern "C" fn leaf() {
        FOUND.with(|found| *found.borrow_mut() = addresses());
        // libgcc knows no way out of generated code; we go on and say so, where we know that it is none of a library.
        assert_eq!((harness().compare)(), if is_old_glibc() { SAME } else { SAME_AND_MARKED });
    }
    descend(30, &mut || {
        let outside = addresses();
        for _ in 0..3 {
            generated(leaf);
            let inside = FOUND.take();
            let jit = inside
                .iter()
                .position(|ip| *ip == page as u64 + returns_to)
                .expect("the generated frame is there");
            if is_old_glibc() {
                assert_eq!(inside.len(), jit + 1);
                continue;
            }
            // Beyond this closure, with what is inlined into it or not, everything is the same.
            assert!(inside[jit + 1..].ends_with(&outside[3..]), "{inside:x?} {outside:x?}");
            assert!(inside.len() - jit <= outside.len() + 1);
        }
    });
}

/// Compiles a library with a function that calls back from a frame of `bytes`.
fn compile(directory: &Path, name: &str, bytes: u32) -> Option<CString> {
    let source = directory.join(format!("{name}.c"));
    let library = directory.join(format!("{name}.so"));
    let code = format!(
        "int through(void (*f)(void)) {{ volatile char room[{bytes}]; room[0] = 1; f(); return room[0]; }}\n"
    );
    std::fs::write(&source, code).unwrap();
    let status = Command::new("cc")
        .args(["-O2", "-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&source)
        .status()
        .ok()?;
    assert!(status.success(), "cc failed on {}", source.display());
    Some(CString::new(library.into_os_string().into_encoded_bytes()).unwrap())
}

/// Frames of changing sizes that end at the same place: the return addresses of earlier calls still lie where they were, and
/// are no longer part of the stack.
#[test]
fn stacks_that_differ_only_in_where_their_frames_lie_are_told_apart() {
    let _alone = LIBRARIES.lock();
    let directory = std::env::temp_dir().join(format!("gputrace-room-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let code = "#include <alloca.h>\n\
        static volatile int kept;\n\
        __attribute__((noinline)) void inner(void (*f)(void), int n) { volatile char *room = alloca(n); room[0] = 1; f(); kept += room[0]; }\n\
        __attribute__((noinline)) void middle(void (*f)(void), int n) { f(); kept += n; inner(f, n); kept += n; }\n\
        int outer(void (*f)(void), int n, int m) { volatile char *room = alloca(n); room[0] = 1;\n\
        if (n / 512 % 2) { middle(f, m); __asm__ volatile(\"nop\"); } else { middle(f, m); kept++; }\n\
        return room[0]; }\n";
    let source = directory.join("room.c");
    std::fs::write(&source, code).unwrap();
    for frame_pointers in ["-fomit-frame-pointer", "-fno-omit-frame-pointer"] {
        let library = directory.join(format!("room{frame_pointers}.so"));
        let compiler = Command::new("cc")
            .args(["-O2", "-shared", "-fPIC", frame_pointers, "-o"])
            .arg(&library)
            .arg(&source)
            .status();
        let Ok(status) = compiler else { return skip("a C compiler", "no cc") };
        assert!(status.success());
        let library = CString::new(library.into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: the library just compiled.
        let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW) };
        // SAFETY: it has this function.
        let outer = unsafe { libc::dlsym(handle, c"outer".as_ptr()) };
        (harness().note_loaded)();
        assert!(!outer.is_null());
        // SAFETY: the type in the source above.
        let outer: extern "C" fn(extern "C" fn(), c_int, c_int) -> c_int =
            unsafe { std::mem::transmute(outer) };
        extern "C" fn leaf() {
            assert_eq!((harness().compare)(), SAME);
        }
        for _ in 0..20 {
            for n in black_box(0..8) {
                assert_eq!(outer(leaf, 512 + 512 * n, 512 + 512 * (8 - n)), 1);
            }
        }
    }
    std::fs::remove_dir_all(&directory).unwrap();
}

fn call_through(library: &CString) -> u64 {
    extern "C" fn leaf() {
        for _ in 0..3 {
            assert_eq!((harness().compare)(), SAME);
        }
    }
    // SAFETY: the library just compiled.
    let handle = unsafe { libc::dlopen(library.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null());
    // SAFETY: it has this function.
    let through = unsafe { libc::dlsym(handle, c"through".as_ptr()) };
    (harness().note_loaded)();
    // SAFETY: the type in the source above.
    let call: extern "C" fn(extern "C" fn()) -> c_int = unsafe { std::mem::transmute(through) };
    call(leaf);
    // SAFETY: nothing of it is used any more.
    unsafe { libc::dlclose(handle) };
    through as u64
}

#[test]
fn a_library_loaded_where_another_was_is_walked_by_its_own_rules() {
    let _alone = LIBRARIES.lock();
    let directory = std::env::temp_dir().join(format!("gputrace-stack-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let Some(small) = compile(&directory, "small", 40) else {
        return skip("a C compiler", "no cc");
    };
    let large = compile(&directory, "large", 4000).unwrap();
    let mut n_reused = 0;
    for _ in 0..20 {
        let first = call_through(&small);
        (harness().note_unloaded)();
        n_reused += u32::from(call_through(&large) == first);
        (harness().note_unloaded)();
    }
    std::fs::remove_dir_all(&directory).unwrap();
    eprintln!("{n_reused} of 20 times at the same address");
}

#[test]
fn all_of_this_holds_without_dl_find_object_too() {
    if is_old_glibc() {
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap()).env(OLD_GLIBC, "1").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

#[test]
fn captures_go_on_while_other_threads_load_and_unload_libraries() {
    let _alone = LIBRARIES.lock();
    static STOP: AtomicBool = AtomicBool::new(false);
    let n_loaded = std::thread::scope(|scope| {
        let storm = scope.spawn(|| {
            let mut n = 0u64;
            while !STOP.load(Ordering::Relaxed) {
                for name in
                    [c"libresolv.so.2", c"libanl.so.1", c"libutil.so.1", c"libnsl.so.1", c"libthread_db.so.1"]
                {
                    // SAFETY: libraries of the system without side effects.
                    let handle: *mut c_void = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
                    if !handle.is_null() {
                        n += 1;
                        // SAFETY: just opened.
                        unsafe { libc::dlclose(handle) };
                        (harness().note_unloaded)();
                    }
                }
            }
            n
        });
        for depth in 0..2000 {
            descend(depth % 90, &mut || assert_eq!((harness().compare)(), SAME));
        }
        STOP.store(true, Ordering::Relaxed);
        storm.join().unwrap()
    });
    assert!(n_loaded > 0, "no library could be loaded");
}

//! What a thread waits for in the kernel, and what a stop does to that call. No call may end, or take longer, because somebody attached.

use crate::opened::Descriptors;
use rustix::io::Errno;
use std::fs;

/// What a stop does to a call that waits (signal(7)).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    /// It can be made again, and is the same.
    Same,
    /// The kernel resumes it for the rest of its time. The thread can be borrowed at its next call.
    Resumed,
    /// It ends early, or its time begins anew. That changes nothing if it has only just begun.
    Anew,
    /// It may end with a part of its work done.
    Parts,
    /// It may end.
    Ends,
}

/// A call into the kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) number: i64,
    pub(super) arguments: [u64; 6],
}

impl Call {
    /// The call that a thread is in, as far as it can be seen without stopping it. `None` for a thread that runs.
    pub(super) fn of(pid: u32, thread: u32) -> Option<Call> {
        let line = fs::read_to_string(format!("/proc/{pid}/task/{thread}/syscall")).ok()?;
        let mut words = line.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let mut arguments = [0; 6];
        let hex = words.filter_map(|it| u64::from_str_radix(it.strip_prefix("0x")?, 16).ok());
        for (to, from) in arguments.iter_mut().zip(hex) {
            *to = from;
        }
        Some(Call { number, arguments })
    }

    /// What a stop does to it.
    pub(super) fn when_stopped(&self, pid: u32) -> Effect {
        self.effect(|descriptor| has_timeout(pid, descriptor))
    }

    /// Whether it may be borrowed from and made again as it was, however long it has waited.
    pub(super) fn is_same(&self, pid: u32) -> bool {
        self.when_stopped(pid) == Effect::Same
    }

    /// `has_timeout`: whether a descriptor is a socket on which waits end after a time.
    fn effect(&self, has_timeout: impl Fn(u64) -> bool) -> Effect {
        let [descriptor, second, third, fourth, fifth, sixth] = self.arguments;
        let for_ever = |is_so: bool, otherwise: Effect| if is_so { Effect::Same } else { otherwise };
        let received = |flags: u64| match flags as i32 & libc::MSG_WAITALL {
            0 => for_ever(!has_timeout(descriptor), Effect::Anew),
            // It would return what it has by now.
            _ => Effect::Parts,
        };
        match self.number {
            libc::SYS_wait4 => Effect::Same,
            // The kernel writes down the rest of its time. With a mask of signals, see below.
            libc::SYS_select => Effect::Same,
            libc::SYS_pselect6 if sixth == 0 => Effect::Same,
            libc::SYS_read | libc::SYS_accept | libc::SYS_accept4 => {
                for_ever(!has_timeout(descriptor), Effect::Anew)
            }
            libc::SYS_recvfrom => received(fourth),
            libc::SYS_recvmsg => received(third),
            libc::SYS_poll => for_ever((third as i32) < 0, Effect::Resumed),
            libc::SYS_epoll_wait => for_ever((fourth as i32) < 0, Effect::Anew),
            libc::SYS_clock_nanosleep => for_ever(second as i32 & libc::TIMER_ABSTIME != 0, Effect::Resumed),
            libc::SYS_nanosleep | libc::SYS_restart_syscall => Effect::Resumed,
            libc::SYS_futex => match second as i32 & !(libc::FUTEX_PRIVATE_FLAG | libc::FUTEX_CLOCK_REALTIME)
            {
                libc::FUTEX_WAIT => for_ever(fourth == 0, Effect::Resumed),
                // Until a moment, not for a while.
                libc::FUTEX_WAIT_BITSET => Effect::Same,
                _ => Effect::Ends,
            },
            // With a mask of signals of its own, which the kernel would have to give back first.
            libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 if fifth != 0 => Effect::Ends,
            libc::SYS_epoll_pwait => for_ever((fourth as i32) < 0, Effect::Anew),
            libc::SYS_epoll_pwait2 => for_ever(fourth == 0, Effect::Anew),
            libc::SYS_write
            | libc::SYS_pwrite64
            | libc::SYS_writev
            | libc::SYS_pwritev
            | libc::SYS_pwritev2
            | libc::SYS_sendto
            | libc::SYS_sendmsg
            | libc::SYS_sendmmsg
            | libc::SYS_sendfile
            | libc::SYS_splice
            | libc::SYS_tee
            | libc::SYS_vmsplice
            | libc::SYS_copy_file_range
            | libc::SYS_recvmmsg => Effect::Parts,
            libc::SYS_io_getevents | libc::SYS_rt_sigtimedwait | libc::SYS_semtimedop => Effect::Anew,
            _ => Effect::Ends,
        }
    }
}

/// Whether a wait on a descriptor of the process ends after a time (`SO_RCVTIMEO`). In doubt, it does.
fn has_timeout(pid: u32, descriptor: u64) -> bool {
    let Ok(number) = u32::try_from(descriptor) else { return false };
    // Nothing but a socket is touched.
    match fs::read_link(format!("/proc/{pid}/fd/{number}")) {
        Ok(link) if !link.as_os_str().as_encoded_bytes().starts_with(b"socket:") => return false,
        _ => {}
    }
    match Descriptors::of(pid).take(number).map(|taken| taken.receives_for()) {
        Ok(Ok(limit)) => limit.is_some(),
        Ok(Err(Errno::NOTSOCK)) => false,
        _ => true,
    }
}

/// Whether a thread sleeps, and how often it has begun to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Sleep {
    pub(super) is_asleep: bool,
    /// It cannot be woken.
    pub(super) is_deep: bool,
    pub(super) times: u64,
}

impl Sleep {
    pub(super) fn of(pid: u32, thread: u32) -> Option<Sleep> {
        fs::read_to_string(format!("/proc/{pid}/task/{thread}/status")).ok().map(|text| Sleep::parse(&text))
    }

    fn parse(text: &str) -> Sleep {
        let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map_or("", str::trim);
        let state = value("State:").chars().next();
        Sleep {
            is_asleep: matches!(state, Some('S' | 'D')),
            is_deep: state == Some('D'),
            times: value("voluntary_ctxt_switches:").parse().unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn effect(number: i64, arguments: [u64; 6]) -> Effect {
        // Descriptor 9 is a socket with a timeout.
        Call { number, arguments }.effect(|descriptor| descriptor == 9)
    }

    #[test]
    fn only_calls_that_are_the_same_when_made_again_are_interrupted_at_any_time() {
        let minus_one = u64::from(u32::MAX);
        for (number, arguments, expected) in [
            (libc::SYS_read, [3, 0, 1, 0, 0, 0], Effect::Same),
            (libc::SYS_read, [9, 0, 1, 0, 0, 0], Effect::Anew),
            (libc::SYS_accept, [9, 0, 0, 0, 0, 0], Effect::Anew),
            (libc::SYS_accept4, [3, 0, 0, 0, 0, 0], Effect::Same),
            (libc::SYS_recvfrom, [9, 0, 1, 0, 0, 0], Effect::Anew),
            (libc::SYS_recvfrom, [3, 0, 1, 0, 0, 0], Effect::Same),
            (libc::SYS_recvfrom, [3, 0, 1, libc::MSG_WAITALL as u64, 0, 0], Effect::Parts),
            (libc::SYS_recvmsg, [3, 0, libc::MSG_WAITALL as u64, 0, 0, 0], Effect::Parts),
            (libc::SYS_select, [0, 0, 0, 0, 4096, 0], Effect::Same),
            (libc::SYS_pselect6, [0, 0, 0, 0, 4096, 0], Effect::Same),
            (libc::SYS_pselect6, [0, 0, 0, 0, 4096, 4096], Effect::Ends),
            (libc::SYS_poll, [0, 1, minus_one, 0, 0, 0], Effect::Same),
            (libc::SYS_poll, [0, 1, 1000, 0, 0, 0], Effect::Resumed),
            (libc::SYS_epoll_wait, [3, 0, 1, minus_one, 0, 0], Effect::Same),
            (libc::SYS_epoll_wait, [3, 0, 1, 1000, 0, 0], Effect::Anew),
            (libc::SYS_epoll_pwait, [3, 0, 1, 1000, 0, 8], Effect::Anew),
            (libc::SYS_epoll_pwait, [3, 0, 1, minus_one, 0, 8], Effect::Same),
            (libc::SYS_epoll_pwait, [3, 0, 1, minus_one, 1, 8], Effect::Ends),
            (libc::SYS_epoll_pwait2, [3, 0, 1, 1, 0, 8], Effect::Anew),
            (libc::SYS_io_getevents, [0, 1, 1, 0, 1, 0], Effect::Anew),
            (libc::SYS_futex, [0, 0, 0, 0, 0, 0], Effect::Same),
            (libc::SYS_futex, [0, 0, 0, 1, 0, 0], Effect::Resumed),
            (libc::SYS_futex, [0, 0x189, 0, 1, 0, 0], Effect::Same),
            (libc::SYS_futex, [0, libc::FUTEX_LOCK_PI as u64, 0, 0, 0, 0], Effect::Ends),
            (libc::SYS_write, [1, 0, 1, 0, 0, 0], Effect::Parts),
            (libc::SYS_connect, [3, 0, 1, 0, 0, 0], Effect::Ends),
        ] {
            assert_eq!(effect(number, arguments), expected, "call {number}, {arguments:?}");
        }
    }

    #[test]
    fn a_socket_says_whether_waits_on_it_end() {
        use std::os::fd::AsRawFd;
        use std::os::unix::net::UnixStream;
        let (one, other) = UnixStream::pair().expect("two sockets");
        one.set_read_timeout(Some(std::time::Duration::from_secs(2))).expect("a timeout");
        let own = std::process::id();
        assert!(has_timeout(own, one.as_raw_fd() as u64));
        assert!(!has_timeout(own, other.as_raw_fd() as u64));
        let file = std::fs::File::open("/dev/null").expect("a file");
        assert!(!has_timeout(own, file.as_raw_fd() as u64));
    }

    #[test]
    fn sleep_is_read_as_the_kernel_writes_it() {
        let text = "Name:\ta\nState:\tD (disk sleep)\nvoluntary_ctxt_switches:\t12\nnonvoluntary_ctxt_switches:\t3\n";
        assert_eq!(Sleep::parse(text), Sleep { is_asleep: true, is_deep: true, times: 12 });
        assert!(!Sleep::parse("State:\tR (running)\n").is_asleep);
    }
}

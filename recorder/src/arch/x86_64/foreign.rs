//! The memory of another process, read while it runs (`/proc/PID/mem`).
//!
//! The kernel lets only those read who may trace the process (`PTRACE_MODE_ATTACH`): its own user where yama's `ptrace_scope` is 0,
//! root else.

use crate::opened::text_of_proc;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// No structure lies below.
pub(crate) const LEAST_ADDRESS: u64 = 4096;

/// The memory of the process.
pub(crate) struct Foreign {
    memory: File,
}

impl Foreign {
    /// Of a process by its number in the `/proc` that we see.
    pub(crate) fn open(pid: u32) -> io::Result<Foreign> {
        Ok(Foreign { memory: File::open(format!("/proc/{pid}/mem"))? })
    }

    pub(crate) fn bytes(&self, address: u64, to: &mut [u8]) -> Option<()> {
        if address < LEAST_ADDRESS {
            return None;
        }
        self.memory.read_exact_at(to, address).ok()
    }

    /// As many bytes as there are from an address on, `most` at most.
    pub(crate) fn up_to(&self, address: u64, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        let mut length = 0;
        while address >= LEAST_ADDRESS && length < most {
            match self.memory.read_at(&mut bytes[length..], address.wrapping_add(length as u64)) {
                Ok(0) | Err(_) => break,
                Ok(n) => length += n,
            }
        }
        bytes.truncate(length);
        bytes
    }

    pub(crate) fn word(&self, address: u64, offset: u16) -> Option<u64> {
        let mut word = [0; 8];
        self.bytes(address.checked_add(u64::from(offset))?, &mut word)?;
        Some(u64::from_le_bytes(word))
    }

    pub(crate) fn half(&self, address: u64, offset: u16) -> Option<u32> {
        self.word(address, offset).map(|word| word as u32)
    }
}

/// What to do where the kernel refuses.
pub(crate) fn remedy() -> &'static str {
    let scope = text_of_proc("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    match scope.trim() {
        "1" => {
            "only root or the parent of the process may do this (kernel.yama.ptrace_scope=1): run this as root, or set it to 0"
        }
        "2" => "only root may do this (kernel.yama.ptrace_scope=2): run this as root",
        "3" => "not allowed on this machine (kernel.yama.ptrace_scope=3)",
        _ => "only its own user and root may do this, and only if it is dumpable",
    }
}

//! The functions that the compiler calls of itself, for copies, comparisons and, on some processors, atomic operations that it does not write out: here and not in
//! the C library, where sanitizers and other preloaded libraries stand in for them, some before they are ready.
//!
//! In assembly, because whatever Rust calls `no_mangle` is exported, and because a copy written in Rust may be
//! compiled to a call of itself: one version per processor ([`crate::arch`]).

crate::arch::compiler_functions!();

//! Simulates GPU memory allocators: give it what a program asked for, and it says what PyTorch's caching allocator, or another
//! one, would have made of it, to the byte where the allocator is public.
//!
//! An [`ops::OpStream`] is the program: requests and frees in order, and what was recorded about the run, if it was. A
//! [`policies::Policy`] is the allocator, a [`device::Device`] the GPU, with the addresses that an [`addresses::AddressSpace`]
//! hands out; [`simulator::run`] plays the one against the other. [`whatif::Laboratory`] asks whole questions of a recorded
//! stream and says how sure the answer is. This crate reads no file and prints nothing.
//!
//! ```
//! use gputrace_sim::ops::{Allocation, Builder, Op, PoolIdx, StackId, StreamIdx};
//! use gputrace_sim::policies::torch::NEWEST;
//! use gputrace_sim::whatif::{Laboratory, Question};
//!
//! // Three tensors; the second is freed before the third is asked for.
//! let mut builder = Builder::new(0);
//! let mut ask = |builder: &mut Builder, bytes| {
//!     let (stack, stream, pool) = (StackId::NONE, StreamIdx(0), PoolIdx::DEFAULT);
//!     builder.alloc(Allocation { requested: bytes, address: 0, stack, stream, pool })
//! };
//! ask(&mut builder, 5 << 20);
//! let second = ask(&mut builder, 12 << 20);
//! builder.op(Op::FreeRequested(second));
//! builder.op(Op::FreeCompleted(second));
//! ask(&mut builder, 13 << 20);
//! let stream = builder.finish();
//!
//! let question = Question::torch(NEWEST, "");
//! let outcome = Laboratory::new(&stream)?.answer(&question)?.outcome;
//! // A segment of 20 MiB holds the first two; what is left of it is enough for the third.
//! assert_eq!(outcome.books.reserved.peak, 20 << 20);
//! assert_eq!(outcome.books.requested.peak, 18 << 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

pub mod addresses;
pub mod audit;
pub mod bounds;
pub mod bytes;
pub mod cores;
pub mod device;
pub mod driver;
pub mod edits;
pub mod effort;
pub mod gap;
pub mod ops;
mod placement;
pub mod plan;
pub mod policies;
pub mod predict;
pub mod progress;
mod ranges;
mod replays;
pub mod simulator;
pub mod skip;
pub mod stacks;
pub mod tune;
pub mod whatif;

//! Whole-system tests: small programs, run on a fake CUDA under NVIDIA's own runtimes, and the independent truth about
//! what they did.

pub mod calls;
pub mod nccl_jobs;
pub mod patience;
pub mod programs;
pub mod recorded;
pub mod rows;
pub mod wheels;

//! Every function we stand in for, by where it comes from.

pub(crate) mod autograd;
mod contexts;
mod cuda_driver;
pub(crate) mod events;
pub(crate) mod loaded;
pub(crate) mod loader;
pub(crate) mod nccl;
mod nccl_loader;
pub(crate) mod nvshmem;
pub(crate) mod nvtx;
pub(crate) mod pjrt;
mod process_groups;
mod structs;
pub(crate) mod torch;
mod torch_living;
mod torch_pools;
mod unhooked;
pub(crate) mod unload;

pub(crate) use cuda_driver::HOOKS;

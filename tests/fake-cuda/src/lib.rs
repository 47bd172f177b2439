//! A `libcuda.so.1` without a GPU.

"""Spectral gating of recordings of many different lengths with CuPy."""
import sys

import cupy

FIXED = "--fixed" in sys.argv


def recording(seconds, seed):
    rng = cupy.random.RandomState(seed)
    n = int(seconds * 44100) | 1
    return rng.standard_normal(n, dtype=cupy.float32).astype(cupy.complex64)


def spectral_gate(signal, keep=0.2):
    spectrum = cupy.fft.fft(signal)
    power = cupy.abs(spectrum)
    threshold = power.max() * (1 - keep)
    spectrum *= power > threshold * 0.5
    return cupy.fft.ifft(spectrum).real


def pool_state(pool):
    return f"in use {pool.used_bytes() >> 20} MiB, held {pool.total_bytes() >> 20} MiB"


def process(pool, lengths):
    energy = []
    for i, seconds in enumerate(lengths):
        signal = recording(seconds, i)
        cleaned = spectral_gate(signal)
        energy.append(float((cleaned ** 2).mean()))
        del signal, cleaned
        pool.free_all_blocks()
        print(f"recording {i} {seconds:.1f}s energy {energy[-1]:.4f} {pool_state(pool)}")
    return energy


def main():
    pool = cupy.get_default_memory_pool()
    if FIXED:
        cupy.fft.config.get_plan_cache().set_size(0)
    lengths = [180 + 3.7 * k for k in range(16)]
    process(pool, lengths)
    free, total = cupy.cuda.runtime.memGetInfo()
    print(f"end: {pool_state(pool)}, card in use {(total - free) >> 20} MiB")


if __name__ == "__main__":
    main()

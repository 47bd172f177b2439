"""CuPy image pipeline over frames of a few sizes; the pool serves the same blocks again and again."""
import cupy


def frame(index):
    height, width = ((2160, 3840), (1080, 1920), (1440, 2560))[index % 3]
    rng = cupy.random.RandomState(index)
    return rng.random_sample((8, height, width), dtype=cupy.float32)


def smooth(images):
    padded = cupy.pad(images, ((0, 0), (1, 1), (1, 1)), mode="edge")
    total = cupy.zeros_like(images)
    for dy in range(3):
        for dx in range(3):
            total += padded[:, dy:dy + images.shape[1], dx:dx + images.shape[2]]
    return total / 9


def process(index):
    images = frame(index)
    edges = cupy.abs(images - smooth(images))
    return float(edges.mean())


def main():
    pool = cupy.get_default_memory_pool()
    results = []
    for index in range(60):
        results.append(process(index))
        if index % 10 == 0:
            print(f"frame {index} edge {results[-1]:.4f} in use {pool.used_bytes() >> 20} MiB held {pool.total_bytes() >> 20} MiB")
    print("mean", sum(results) / len(results))


if __name__ == "__main__":
    main()

# cannot_tell: CuPy arrays in a list that nobody reads; CuPy gives its driver nothing back, as where a program loads.
import cupy
log = []
for step in range(40):
    x = cupy.random.random((1024, 1024), dtype=cupy.float32)
    y = x @ x
    log.append(cupy.repeat(y.ravel()[:256], 8192))  # <- fault
    cupy.cuda.Device().synchronize()

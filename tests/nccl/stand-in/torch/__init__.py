"""The part of PyTorch that a program of `gputrace reproduce DIR` uses, on the stand-in for NCCL: ../../hanging.py runs such programs."""
from . import distributed

int8, uint8, int32, int64 = "INT8", "UINT8", "INT32", "INT64"
float16, float32, float64, bfloat16 = "HALF", "FLOAT", "DOUBLE", "BFLOAT16"


class Tensor:
    def __init__(self, count, dtype):
        self.count, self.dtype = count, dtype


def zeros(count, dtype=None, device=None):
    return Tensor(count, dtype)


def empty_like(tensor):
    return Tensor(tensor.count, tensor.dtype)


zeros_like = empty_like


class cuda:
    @staticmethod
    def set_device(_device):
        pass

    @staticmethod
    def synchronize():
        distributed.wait()

"""What memory holds that nobody has filled: numbers that no program can take for its own."""

import numpy as np
import numpy.typing as npt
import torch

_WORD = np.uint32(0xFFF5A5A5)


def poison(memory: npt.NDArray[np.uint8]) -> None:
    """Makes any number in it a wrong one: integers are negative and large, floats of 32 and 64 bits are not numbers."""
    words = memory.nbytes // 4 * 4
    memory[:words].view(np.uint32)[...] = _WORD
    memory[words:] = 0xA5


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """New host memory that holds nothing else."""
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        poison(tensor.view(-1).view(torch.uint8).numpy())
    return tensor

"""A tensor made of other tensors, of the form in which torchao's 8-bit AdamW keeps its states (`OptimState8bit`)."""

from typing import Any

import torch


class OptimState8bit(torch.Tensor):
    """Codes and their scale, behind a tensor that has no storage."""

    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> "OptimState8bit":
        """Make the tensor that stands for both."""
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, function: Any, _types: Any, args: Any, _more: Any = None) -> Any:
        """Answer what a save asks for."""
        return False if "is_pinned" in str(function) else args[0]

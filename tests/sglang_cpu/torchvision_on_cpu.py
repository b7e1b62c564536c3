"""Lets the published torchvision, a CUDA build, be imported beside a CPU build of torch.

Its operators come from a library that does not load there, and it stops at import since it wants to add to two of them.
So these are declared right before. A .pth file imports this module when Python starts.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


class BeforeTorchvision(MetaPathFinder):
    """Finds nothing; notices the first import of torchvision."""

    library: Any = None  # declarations last as long as this

    def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> None:
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for declaration in DECLARED:
                self.library.define(declaration)


sys.meta_path.insert(0, BeforeTorchvision())

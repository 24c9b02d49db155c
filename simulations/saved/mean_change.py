"""``MeanChange``: the mean of models, at several scales of its change from a base."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fedrot.tensors import Tensors

#: Scales of the change from a base among which held-out rows choose, by name.
SCALES = {
    "the base (scale 0)": 0.0,
    "scale 0.3": 0.3,
    "scale 0.5": 0.5,
    "scale 0.7": 0.7,
    "the mean (scale 1)": 1.0,
    "scale 1.3": 1.3,
}


class MeanChange(NamedTuple):
    """The mean of models and their base, both in the same coordinates.

    Source: Ilharco et al. 2023 (task arithmetic, arXiv 2212.04089), where one scale
    multiplies the sum of the changes, not their mean.

    Attributes:
        mean: in float32 or float64.
        base: without the tensors that it lacks; empty: there is no base.
        like: a model whose dtypes the results have.
    """

    mean: Tensors
    base: Tensors
    like: Tensors

    def at(self, scale: float) -> Tensors:
        """Return ``base + scale * (mean - base)``; what the base lacks is the mean's.

        It is exact at 0 and 1.
        """
        scaled = {}
        for name, tensor in self.mean.items():
            if name in self.base:
                tensor = torch.lerp(self.base[name].to(tensor), tensor, scale)
            scaled[name] = tensor.to(self.like[name].dtype)
        return scaled

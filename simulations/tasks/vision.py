"""Task ``image``: the label of an image."""

from __future__ import annotations

import math
from typing import Any

from fedrot.simulations.data import DIGITS
from fedrot.simulations.scenario import Scenario
from fedrot.simulations.tasks.classification import Classification
from fedrot.simulations.tasks.objective import EncodedData


class ImageClassification(Classification):
    """Prediction of an image's label."""

    name = "image"
    architectures = ("vit",)
    auto_model = "ImageClassification"
    usual_data = DIGITS
    peft = ""
    reads_pooling = False

    @staticmethod
    def read(scenario: Scenario) -> EncodedData:
        from fedrot.simulations.data.pictures import encoded_images

        return encoded_images(scenario)

    @staticmethod
    def sizes_of_inputs(scenario: Scenario, data: Any) -> dict[str, int]:
        side, _, channels = data.shape
        return {
            "image_size": side,
            "patch_size": _patch_size(side),
            "num_channels": channels,
        }


def _patch_size(side: int) -> int:
    """Return the largest divisor of a side up to its square root.

    It is 2 for 8, 4 for 28 and 32, 8 for 64.
    """
    patch = math.isqrt(side)
    while side % patch:
        patch -= 1
    return patch

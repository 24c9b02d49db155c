"""Task ``image``: the label of an image."""

from __future__ import annotations

from fedrot.simulations.data import DIGITS
from fedrot.simulations.scenario import Scenario
from fedrot.simulations.tasks.classification import Classification
from fedrot.simulations.tasks.objective import EncodedData
from fedrot.simulations.tasks.task_registry import register


@register
class ImageClassification(Classification):
    """Prediction of an image's label."""

    name = "image"
    architectures = ("vit",)
    auto_model = "ImageClassification"
    usual_data = DIGITS
    peft = ""
    joins_domains = False
    reads_pooling = False

    @staticmethod
    def read(scenario: Scenario) -> EncodedData:
        from fedrot.simulations.data.pictures import encoded_images

        return encoded_images(scenario)

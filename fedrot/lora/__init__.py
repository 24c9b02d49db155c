"""LoRA adapters: averages of factors and of their products, gauges, and PEFT models."""

from fedrot.lora.adapter_options import AdapterOptions, AdapterReport
from fedrot.lora.adapters import LoraSettings
from fedrot.lora.averaging import AdapterUpdate, average_adapters
from fedrot.lora.fitting import fitted
from fedrot.lora.peft_model import adapter_tensors, load_adapter, load_as_sent, train_only
from fedrot.lora.regression import RegressedProducts as RegressedProducts  # registers its method

__all__ = [
    "AdapterOptions",
    "AdapterReport",
    "AdapterUpdate",
    "LoraSettings",
    "adapter_tensors",
    "average_adapters",
    "fitted",
    "load_adapter",
    "load_as_sent",
    "train_only",
]

"""LoRA adapters: averages of factors and of their products, and gauges."""

from fedrot.lora.adapters import LoraSettings
from fedrot.lora.averaging import AdapterOptions, AdapterReport, AdapterUpdate, average_adapters
from fedrot.lora.fitting import fitted

__all__ = [
    "AdapterOptions",
    "AdapterReport",
    "AdapterUpdate",
    "LoraSettings",
    "average_adapters",
    "fitted",
]

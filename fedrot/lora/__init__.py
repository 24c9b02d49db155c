"""LoRA adapters: averages of factors and of their products, gauges, and PEFT models."""

from fedrot.lora.adapter_report import AdapterReport
from fedrot.lora.adapters import AdapterUpdate, LoraSettings
from fedrot.lora.averaging import AdapterOptions, average_adapters
from fedrot.lora.peft_model import (
    adapter_tensors,
    fitted,
    load_adapter,
    load_as_sent,
    train_only,
)

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

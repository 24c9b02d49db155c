"""LoRA adapters: averages of factors and of their products, gauges, and PEFT models."""

from fedrot.lora.adapter_options import AdapterOptions, AdapterReport
from fedrot.lora.adapter_symmetry import adapter_symmetry
from fedrot.lora.adapters import LoraSettings
from fedrot.lora.averaging import AdapterUpdate, average_adapters
from fedrot.lora.fitting import fitted
from fedrot.lora.optimizer_state import move_optimizer_state
from fedrot.lora.peft_model import TRAIN, adapter_tensors, load_adapter, train_only

__all__ = [
    "TRAIN",
    "AdapterOptions",
    "AdapterReport",
    "AdapterUpdate",
    "LoraSettings",
    "adapter_symmetry",
    "adapter_tensors",
    "average_adapters",
    "fitted",
    "load_adapter",
    "move_optimizer_state",
    "train_only",
]

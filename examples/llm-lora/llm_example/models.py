"""The language model with its LoRA adapter."""

from __future__ import annotations

import math
from importlib.util import find_spec
from logging import WARNING
from typing import Any

import torch
from flwr.app import UserConfig
from flwr.common import log
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def get_model(config: UserConfig) -> Any:
    """Return the base model, in 4 or 8 bits where a GPU and bitsandbytes are there,
    with an adapter.
    """
    name, bits = str(config["model.name"]), int(config["model.quantization"])
    if bits and not (DEVICE.type == "cuda" and find_spec("bitsandbytes")):
        log(
            WARNING,
            "No GPU with bitsandbytes: the base model is not quantised to %d bits.",
            bits,
        )
        bits = 0
    if bits:
        quantised = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
        base = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantised)
        base = prepare_model_for_kbit_training(base)
    else:
        base = AutoModelForCausalLM.from_pretrained(name)
    targets = str(config["model.lora.target-modules"])
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=int(config["model.lora.peft-lora-r"]),
        lora_alpha=int(config["model.lora.peft-lora-alpha"]),
        target_modules=targets if targets == "all-linear" else targets.split("+"),
    )
    return get_peft_model(base, lora)


def learning_rate(config: UserConfig, server_round: int) -> float:
    """Return the learning rate of a round, which falls from the first to the last as a
    cosine.
    """
    high, low = (
        float(config["train.learning-rate-max"]),
        float(config["train.learning-rate-min"]),
    )
    done = (server_round - 1) / int(config["num-server-rounds"])
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * done))

"""A language model, tuned on instructions by clients that send LoRA adapters."""

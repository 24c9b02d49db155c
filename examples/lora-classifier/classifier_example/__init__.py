"""A Hugging Face classifier with LoRA adapters of different ranks, federated."""

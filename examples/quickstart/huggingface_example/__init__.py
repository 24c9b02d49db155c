"""A Hugging Face classifier, federated."""

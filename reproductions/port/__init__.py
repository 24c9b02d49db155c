"""Saved models rewritten: in canonical form, or as the port of a fine-tuning to another base."""

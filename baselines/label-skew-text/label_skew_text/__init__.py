"""label_skew_text: A Flower Baseline."""

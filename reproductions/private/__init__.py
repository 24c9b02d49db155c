"""What clients' answers tell about their rows, measured."""

"""The app of the benchmark of whole rounds in a deployment."""

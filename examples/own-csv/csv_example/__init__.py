"""Sites with a csv each, federated."""

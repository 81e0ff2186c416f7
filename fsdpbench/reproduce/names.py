"""What can be named on the command line, known without torch."""

PUBLICATION = "fsdp-paper"
NAMES = ("2a", "2b", "5", "6a", "6b", "6c", "7a", "7b", "7c", "8a", "8b", "8c", "2022", "104509")
"""What `--only` takes: the paper's figures, the runs of PyTorch 1.11's announcement, an issue of PyTorch."""

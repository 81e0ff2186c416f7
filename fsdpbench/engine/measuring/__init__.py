"""The training loop that is measured: its steps, the warm-up, and soaks of thousands of steps."""

"""The training loop that is measured: a step, the warm-up before it, and soaks of thousands of steps."""

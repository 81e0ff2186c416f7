"""The process group `sim`: collectives that take time and move nothing."""

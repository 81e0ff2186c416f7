"""The process group `sim`, whose collectives take time and move no data."""

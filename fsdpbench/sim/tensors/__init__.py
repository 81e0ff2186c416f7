"""Tensors without data: creation, storages, wrappers, pinned host memory."""

"""A configuration: its settings, its steps, its key. Imports nothing above it.

    config.py          `Config`: model, system, device, world, settings; to JSON and back
    numbers.py         limits of numbers that people type

The other files are one option each.
"""

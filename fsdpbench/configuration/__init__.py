"""What a configuration is: its settings, its steps, its key. Imports nothing above it.

    setting_table.py   the settings: values, reasons of defaults
    settings.py        one value of every setting
    config.py          `Config`: model, system, device, world, settings; to JSON and back
    numbers.py         limits of numbers that people type

The other files are one option each.
"""

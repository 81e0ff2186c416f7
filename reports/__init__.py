"""Trace reading, analysis and reports. Needs no torch and accepts traces of any program.

This file imports nothing, so that each part can be used without the others.
"""

if __name__ == "reports":
    from fsdpbench import stand_for

    stand_for(__name__)

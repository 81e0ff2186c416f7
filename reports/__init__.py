"""Trace reading, analysis and reports; needs no torch and works on anybody's traces.

Nothing is imported here, so that a part can be used without the others.
"""

if __name__ == "reports":
    from fsdpbench import stand_for

    stand_for(__name__)

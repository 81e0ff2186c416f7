"""Trace reading, analysis and reports; needs no torch and works on anybody's traces.

Nothing is imported here: the bench reads files through `reports.reading`, also where it needs no analysis.
"""

if __name__ == "reports":
    from fsdpbench.base.bare_names import stand_for

    stand_for(__name__)

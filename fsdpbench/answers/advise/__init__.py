"""Changes to a training script: simulated variants of it, each with its gain and the line to write.

    result of the unchanged script ──> candidates.py: possible changes and their places
        ──> advisor.py: simulates each ──> text.py: faults and gains, the largest first

`script/variations` defines the variants.
"""

from fsdpbench.answers.advise.advisor import Advice, advise_script, fitting_mix

"""Changes to a training script: variants of it, each simulated, with what it gains and the line to
write.

    result of the script as it is ──> candidates.py: what could be changed, and where
        ──> advisor.py: each simulated ──> text.py: faults and gains, the largest first

Which variants there are: `script/variations`.
"""

from fsdpbench.answers.advise.advisor import Advice, advise_script, fitting_mix

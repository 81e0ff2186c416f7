"""What a group of collectives takes beyond one collective of as many bytes: a share for each further member.

NCCL runs the members of ``ncclGroupStart/End`` on one communicator as work of one kernel. Each has a place in
the kernel's queue of work and, on the host, its own checks, plan and record in torch's process group.

Estimated: NCCL's own documentation gives no figure, and no GPU has run this here. A further member is taken
to cost as much as half of an ordinary kernel launch on the host, and on the device as much as a small copy
kernel; figures that depend on them are held with both doubled (``ci/measured/zero_copy.txt``).
"""

from __future__ import annotations

MEMBER_CPU_NS = 2_000
"""Host time of one more member, nanoseconds."""

MEMBER_NS = 2_000
"""Device time of one more member, nanoseconds."""

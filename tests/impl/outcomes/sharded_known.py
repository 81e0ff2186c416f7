"""Where outcomes of ``fully_shard`` differ from torch's on purpose: see docs/impl-fsdp2.md."""

from __future__ import annotations

from outcomes.rows import Known

DOCUMENT = "docs/impl-fsdp2.md"

KNOWN = [
    Known("sharded_precision_.*", "AttributeError", "ValueError", "an `offload_policy` of the wrong type"),
    Known("sharded_offload_.*", "done", "ValueError", "an `offload_policy` of the wrong"),
    Known("sharded_ignored_text", "TypeError", "ValueError", "a ValueError names the argument"),
    Known("sharded_inside_of_flat", "RuntimeError", "done", "A `fully_shard` unit inside"),
    Known(
        "sharded_written_(in_place|detached)_resharded",
        "done.*",
        "RuntimeError",
        "Writing to sharded parameters between forward and backward",
    ),
    Known(
        "sharded_optimizer_(made_before|while_unsharded|after_evaluation|before_the_last_wrap)",
        "done",
        "RuntimeError",
        "Optimizers made before wrapping, or of unsharded parameters",
    ),
    Known(
        "sharded_calls_reset_inner_first",
        "AttributeError",
        "done",
        "Before the first forward it does nothing",
    ),
    Known(
        "extension_after_wrapping",
        ".*",
        "NotImplementedError",
        "A tensor needs its extensions when it is wrapped",
    ),
]

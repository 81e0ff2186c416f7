"""The device ``sim`` in torch: operators, tensors, streams, process groups and compiled graphs."""

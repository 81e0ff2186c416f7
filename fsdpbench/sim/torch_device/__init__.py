"""The device ``sim`` as torch sees it: operators, tensors, streams, process groups and compiled graphs."""

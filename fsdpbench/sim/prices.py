"""`operator_price` and the types of a user's own operator prices."""

from fsdpbench.sim.torch_device.prices import Call, OperatorCost, Price, operator_price, price, tensor_bytes

__all__ = ["Call", "OperatorCost", "Price", "operator_price", "price", "tensor_bytes"]

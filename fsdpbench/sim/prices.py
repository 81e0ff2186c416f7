"""`operator_price` and the values that a price of a user's own operator is made of."""

from fsdpbench.sim.torch_device.prices import Call, OperatorCost, Price, operator_price, price, tensor_bytes

__all__ = ["Call", "OperatorCost", "Price", "operator_price", "price", "tensor_bytes"]

"""Public interface for prices of a user's own operators: `operator_price` and its types."""

from fsdpbench.sim.torch_device.prices import Call, OperatorCost, Price, operator_price, price, tensor_bytes

__all__ = ["Call", "OperatorCost", "Price", "operator_price", "price", "tensor_bytes"]

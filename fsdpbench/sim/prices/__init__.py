"""What an operator costs: the table of families, and prices of the user's own."""

from fsdpbench.sim.prices.products import FREE, Call, OperatorCost, Price, tensor_bytes
from fsdpbench.sim.prices.table import operator_price, price

__all__ = ["FREE", "Call", "OperatorCost", "Price", "operator_price", "price", "tensor_bytes"]

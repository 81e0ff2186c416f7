"""Prices of operators: the table of families, and users' own prices."""

from fsdpbench.sim.torch_device.prices.families import operator_price, price
from fsdpbench.sim.torch_device.prices.products import FREE, Call, OperatorCost, Price, tensor_bytes

"""`torch.sim`: the device module, streams, events, memory history."""

"""One configuration from worker to result: devices, measuring, the emulated ranks, records and results."""

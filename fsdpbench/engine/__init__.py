"""One configuration from worker to result: devices, measuring, records and results."""

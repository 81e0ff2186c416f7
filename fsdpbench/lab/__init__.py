"""The commands that calibrate and validate the simulator: calibrate, reproduce, validate, expect."""

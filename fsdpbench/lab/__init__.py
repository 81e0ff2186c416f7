"""The commands that judge the simulator itself: calibrate, reproduce, validation."""

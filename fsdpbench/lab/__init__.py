"""The commands that judge the simulator itself: calibrate, doctor, reproduce, validation."""

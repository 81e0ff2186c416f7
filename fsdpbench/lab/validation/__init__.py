"""How far the simulation is from published measurements: cases, predictions, errors."""

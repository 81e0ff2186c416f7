"""How far published runs lay from their predictions, and the intervals that follow from it."""

"""How far published runs were from their predictions, and the intervals that follow from it."""

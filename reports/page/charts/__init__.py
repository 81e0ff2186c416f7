"""The page's charts, as plotly figures and the data of its canvases."""

"""Input data: tokens, images, clicks."""

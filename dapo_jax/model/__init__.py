"""The decoder: families, attention, the head, weights in and out."""

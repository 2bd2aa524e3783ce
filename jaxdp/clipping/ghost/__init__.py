"""Clipping without per-example gradients: ghost norms and book-keeping."""

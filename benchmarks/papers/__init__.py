"""Experiments with the papers: their rows, tables, figures, and the queue that runs them."""

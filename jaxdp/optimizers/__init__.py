"""The optimizers of the papers, each repaired where its privacy claim does not hold."""

"""A private training loop: the step, the batches that it takes, and the trainer around both."""

"""An encoder from images of a random process: the process, batches, training, a probe."""

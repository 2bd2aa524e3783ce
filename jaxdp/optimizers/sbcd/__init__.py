"""The parts of DP-SBCD; the public names are in ``jaxdp.optimizers.block_coordinate``."""

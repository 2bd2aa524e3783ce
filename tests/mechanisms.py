"""Mechanisms of the numbers that tests give in this order: noise, clip norm, batch, records."""

import jaxdp


def sgd_of(noise, clip, batch, size, /, sampling="poisson", **more):
    given = {"noise_multiplier": noise, "l2_clip_norm": clip, "batch_size": batch}
    return jaxdp.dp_sgd(**given, dataset_size=size, sampling=sampling, **more)


def mf_of(noise, clip, batch, size, /, sampling="cyclic_poisson", **more):
    given = {"noise_multiplier": noise, "l2_clip_norm": clip, "batch_size": batch}
    return jaxdp.dp_mf(**given, dataset_size=size, sampling=sampling, **more)

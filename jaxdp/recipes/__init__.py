"""Recipes around training: fixed features, an encoder of your own, whitening, linear models."""

"""Recipes around training: fixed features of images, whitening, linear models of tables."""

"""The five papers: algorithms as published, claims, block coordinate descent, networks, tables.

Nothing of the core imports this package. Importing ``jaxdp.papers.algorithms`` and
``jaxdp.papers.networks`` registers what they hold by name, as the command line does.
"""

"""The version of jaxdp, on its own so that packaging need not import the library."""

__version__ = "0.1.0"

"""Places of rows and parameters on devices, and agreement between processes."""

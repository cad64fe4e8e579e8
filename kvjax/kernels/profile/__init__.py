"""`python -m kvjax.kernels.profile`: decode kernels measured, or their compiler's schedule read."""

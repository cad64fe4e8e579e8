"""`python -m kvjax.kernels.profile`: times decode kernels, or reads their compiler's schedule."""

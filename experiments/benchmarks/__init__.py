"""What is measured on this machine: time, memory, and exactness of a trained model."""

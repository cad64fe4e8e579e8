"""What heads do on texts: where they attend, and how alike they are in that."""

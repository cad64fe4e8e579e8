"""Models and mechanisms that only the studies use; they run on one device."""
